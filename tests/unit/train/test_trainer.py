"""The trainer's parts, one at a time, with stand-ins for the others: no model is trained, and nothing waits for a rank."""

import math
import os
import signal
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from unittest.mock import call, create_autospec

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (it registers the backend)
import torchtitan.train
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import tiny
from pc.errors import UserError
from pc.preconditioner import Preconditioner
from pc_recipe.config import Config
from pc_recipe.config.rank_batches import Degrees, RankBatches
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.files.lock import lock
from pc_recipe.files.run_folder import read_state
from pc_recipe.files.run_log import read_log
from pc_recipe.train import trainer as module
from pc_recipe.train.arm import Arm
from pc_recipe.train.checkpoint import Checkpoints
from pc_recipe.train.diagnostics import Diagnostics
from pc_recipe.train.llama2 import Llama2
from pc_recipe.train.metrics import PCMetricsProcessor
from pc_recipe.train.nonfinite import FiniteSteps
from pc_recipe.train.optimizers import Optimizers
from pc_recipe.train.progress import Progress
from pc_recipe.train.rank_sums import Agreement, OfRanks, SquaredNorm
from pc_recipe.train.slow_ranks import OutputTimes
from pc_recipe.train.spans import Spans
from pc_recipe.train.trainer import Trainer, replaced
from pc_recipe.train.validate import FixedValidator

DEGREES = Degrees(dp_replicate=2, dp_shard=2, cp=3, tp=5, pp=1, world_size=60)
"""each with another effect on the numbers that are logged; 4 ranks read different data"""
TOKENS = 24 * 16
"""of a step"""


PARTS = {
    "checkpointer": Checkpoints, "dataloader": GlobalOrderLoader, "diagnostics": Diagnostics, "optimizers": Optimizers,
    "metrics_processor": PCMetricsProcessor, "preconditioner": Preconditioner, "validator": FixedValidator,
    "_arm": Arm, "_output_times": OutputTimes,
}  # fmt: skip


class Parted(Trainer):
    """Parts that a test does not give are stand-ins, whose methods take what the part's own take."""

    def __getattr__(self, name: str):
        if name not in PARTS:
            raise AttributeError(name)
        vars(self)[name] = create_autospec(PARTS[name], instance=True)
        return vars(self)[name]


def _made(**attributes) -> Trainer:
    """A trainer in step 3 of 10, without what its constructor makes."""
    made = Parted.__new__(Parted)
    config = Config()
    config.training.steps, config.training.seq_len = 10, 16
    config.training.local_batch_size, config.training.global_batch_size = 2, 24
    config.validation.enable = True
    values = {
        "config": config, "step": 3, "ntokens_seen": 0, "device": torch.device("cpu"), "model_parts": [],
        "gradient_accumulation_steps": 3,
        "stopped": False, "_stop_requested": False, "_stop_agreed": False, "_data_error": None, "_has_stepped": True,
        "_batches": RankBatches(DEGREES, config.training),
        "parallel_dims": SimpleNamespace(**asdict(DEGREES), pp_enabled=False),
    }  # fmt: skip
    vars(made).update(values | attributes)
    return made


def _recorded(made: Trainer, *names: str) -> mock.Mock:
    """Records the calls of these parts and of their methods, in order."""
    calls = mock.Mock()
    for name in names:
        calls.attach_mock(getattr(made, name), name)
    return calls


class Operations(TorchDispatchMode):
    """Counts operations, and keeps the keyword arguments of copies."""

    def __init__(self):
        super().__init__()
        self.count, self.copies = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        self.copies += [kwargs] if function is torch.ops.aten._to_copy.default else []
        return function(*args, **(kwargs or {}))


@pytest.fixture
def said(monkeypatch):
    """What the trainer logs."""
    lines: list[str] = []
    monkeypatch.setattr(module, "logger", SimpleNamespace(info=lines.append))
    return lines


# --- a step -----------------------------------------------------------------------------------------


def test_a_step_has_its_parts_in_this_order():
    made, calls, norm, loss = _made(), mock.Mock(), torch.tensor(3.0), torch.tensor(2.0)
    for name in vars(Trainer):
        if name.startswith("_") and not name.startswith("__"):
            setattr(made, name, getattr(calls, name))
    made.lr_schedulers = calls.lr_schedulers
    calls._run_micro_batches.return_value, calls._agree.return_value = loss, Agreement(norm, True, [], 3.0)
    made.train_step("batches")
    assert calls.mock_calls == [
        call._begin_step(), call._run_micro_batches("batches"), call._finish_gradients(), call._agree(loss),
        call._update(norm), call._log(loss, 3.0), call.lr_schedulers.step(), call._validate(), call._end_step(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "pipeline, has_stepped, validates, validated, measures",
    [
        (False, False, True, 2, True),
        (True, False, True, 0, False),  # the first
        (True, True, True, 0, True),
        (True, True, True, 2, False),  # after a validation
        (True, True, False, 2, True),
    ],
)
def test_outputs_are_measured_unless_a_pipeline_finds_its_shapes(pipeline, has_stepped, validates, validated, measures):
    """With those passes, whose inputs are uninitialised."""
    made = _made(_has_stepped=has_stepped)
    made.parallel_dims.pp_enabled, made.config.validation.enable = pipeline, validates
    made.validator.is_due.side_effect = lambda step: step == validated
    calls = _recorded(made, "metrics_processor", "optimizers", "diagnostics")
    made._begin_step()
    assert calls.mock_calls == [
        call.metrics_processor.resume(),
        call.optimizers.zero_grad(),
        call.diagnostics.begin_step(3, measure_outputs=measures),
    ]


def _run_micro_batches(monkeypatch, micro_batches: int, pipeline=False, wrap=lambda loss: loss, **attributes):
    """(loss, trainer, passes, preparations by the number of passes before): micro-batches of 8 sequences over all ranks, the
    first at position 12, after 64 tokens of this rank; the losses are 1, 2, ..."""
    made, passes, prepared = _made(gradient_accumulation_steps=micro_batches, **attributes), [], []
    made.parallel_dims.pp_enabled, made.dataloader.position, made.ntokens_seen = pipeline, 12, 64

    def batches():
        for index in range(micro_batches):
            made.dataloader.position += 8
            made.ntokens_seen += 32
            yield {"input": torch.tensor([index])}, torch.tensor([index + 1])

    def forward_backward(**given):
        passes.append(given)
        return wrap(torch.tensor(float(len(passes)), requires_grad=True))

    made.forward_backward_step = forward_backward
    monkeypatch.setattr(module.fsdp_sync, "prepare_micro_batch", lambda *given: prepared.append((len(passes), *given)))
    return made._run_micro_batches(batches()), made, passes, prepared


def test_a_step_adds_up_the_losses_of_its_micro_batches(monkeypatch):
    loss, made, passes, _ = _run_micro_batches(monkeypatch, 3)
    assert loss == 1 + 2 + 3 and not loss.requires_grad
    for index, given in enumerate(passes):
        assert given.pop("input_dict") == {"input": torch.tensor([index])}
        assert given == {"labels": torch.tensor([index + 1]), "global_valid_tokens": TOKENS}
    assert made.metrics_processor.tokens == (64 + 3 * 32) * 4
    assert made.metrics_processor.positions == range(12, 36)


@pytest.mark.parametrize("micro_batches, expected", [(3, [(0, False), (2, True)]), (1, [(0, True)])])
def test_fsdp_learns_of_the_first_and_the_last_micro_batch(monkeypatch, micro_batches, expected):
    *_, made, _, prepared = _run_micro_batches(monkeypatch, micro_batches)
    parts, section = made.model_parts, made.config.parallelism
    assert prepared == [(before, parts, section, is_last) for before, is_last in expected]


@pytest.mark.parametrize("last_stage, expected", [(True, 3.0), (False, 0.0)])
def test_in_a_pipeline_the_last_stage_has_the_loss(monkeypatch, last_stage, expected):
    """TorchTitan returns -1 elsewhere. A pipeline prepares its micro-batches itself."""
    loss, _, _, prepared = _run_micro_batches(monkeypatch, 2, pipeline=True, pp_has_last_stage=last_stage)
    assert loss == expected and loss.shape == () and prepared == []


def test_batches_and_a_missing_loss_are_on_the_device(monkeypatch):
    there = torch.device("meta")
    loss, _, passes, _ = _run_micro_batches(monkeypatch, 1, pipeline=True, pp_has_last_stage=False, device=there)
    assert loss.device == passes[0]["labels"].device == passes[0]["input_dict"]["input"].device == there


def test_the_host_waits_for_no_copy_to_the_device(monkeypatch):
    """From pageable memory it does, whatever is asked for."""
    with Operations() as operations:
        _run_micro_batches(monkeypatch, 2, device=torch.device("meta"))
        made = _made(device=torch.device("meta"), _rank_numbers=mock.Mock())
        made.metrics_processor.NUMBERS, made.metrics_processor.should_log.return_value = ["loss"], False
        made.diagnostics.measure.return_value = []
        made._log(torch.tensor(2.0), 5.0)
    # inputs and labels of two micro-batches, and the numbers of this rank
    assert [more["non_blocking"] for more in operations.copies] == [True] * 5


def test_a_sharded_loss_becomes_whole(monkeypatch, one_process):
    """Tensor parallelism keeps the loss as a DTensor."""
    mesh = init_device_mesh("cpu", (1,))
    loss, *_ = _run_micro_batches(monkeypatch, 2, wrap=lambda loss: DTensor.from_local(loss, mesh, [Replicate()]))
    assert type(loss) is torch.Tensor and loss == 1 + 2


@pytest.mark.parametrize("pipeline, expected", [(True, 1.0), (False, TOKENS)])
def test_the_gradients_of_a_pipeline_are_divided_by_the_tokens(pipeline, expected):
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), float(TOKENS))
    made = _made(_squared_norm=SquaredNorm([nn.ParameterList([weight])], 1))
    made.parallel_dims.pp_enabled = pipeline
    made.optimizers.pc_times = create_autospec(Spans, instance=True)
    calls = _recorded(made, "diagnostics", "preconditioner", "optimizers")
    calls.attach_mock(made.optimizers.pc_times, "pc_times")
    made._finish_gradients()
    assert weight.grad.tolist() == [expected] * 3
    assert calls.mock_calls == [
        call.diagnostics.begin_update(3), call.pc_times.begin(), call.preconditioner.pull_back(), call.pc_times.end(),
    ]  # fmt: skip
    made.preconditioner = None
    made._finish_gradients()  # without PC


def _agree(monkeypatch, loss=2.0, gradient=3.0, **attributes) -> tuple[Trainer, Agreement]:
    """On one rank, whose gradient is (3, 4), with four loading times; looking ahead takes half a second."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([gradient, 4.0])
    parts = [nn.ParameterList([weight])]
    made = _made(_squared_norm=SquaredNorm(parts, 1), _finite_steps=FiniteSteps(parts, None, limit=3))
    made.checkpointer.minutes_are_over.return_value = False
    made.dataloader.look_ahead.return_value = None
    made.metrics_processor.data_loading_times, made.metrics_processor.positions = [1.0, 2.0, 4.0, 8.0], range(12, 36)
    vars(made).update(attributes)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=iter([100.0, 100.5]).__next__))
    return made, made._agree(torch.tensor(loss))


def test_the_next_batches_are_read_before_the_update(monkeypatch, one_process):
    made, agreed = _agree(monkeypatch)
    assert agreed.norm == agreed.logged_norm == 5.0 and made.optimizers.skips_step is False
    made.dataloader.look_ahead.assert_called_once_with(3)
    assert made.metrics_processor.data_loading_times == [1.0, 2.0, 4.0, 8.5]  # of the last micro-batch
    made.metrics_processor.log_metrics.assert_not_called()
    last, _ = _agree(monkeypatch, step=10)
    last.dataloader.look_ahead.assert_not_called()
    assert last.metrics_processor.data_loading_times == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(
    "requested, no_data, late, stops, saves",
    [
        (False, False, False, False, False),
        (True, False, False, True, False),
        (False, True, False, True, False),
        (False, False, True, False, True),
    ],
)
def test_a_rank_wishes_to_stop_or_to_save(monkeypatch, one_process, requested, no_data, late, stops, saves):
    made = _made()
    made.dataloader.look_ahead.return_value = UserError("the disk is gone") if no_data else None
    made.checkpointer.minutes_are_over.return_value = late
    parts = {"dataloader": made.dataloader, "checkpointer": made.checkpointer}
    made, _ = _agree(monkeypatch, _stop_requested=requested, **parts)
    assert (made._stop_agreed, made.checkpointer.save_is_due) == (stops, saves)


@pytest.mark.parametrize("loss, gradient", [(math.nan, 3.0), (2.0, math.nan), (2.0, math.inf), (2.0, 1e30)])
def test_a_step_that_is_not_finite_is_counted_and_makes_no_update(monkeypatch, one_process, loss, gradient):
    """The squares of gradients of 1e30 are infinite."""
    made, agreed = _agree(monkeypatch, loss, gradient)
    assert made.optimizers.skips_step is True
    made.metrics_processor.log_metrics.assert_called_once_with(3, {"steps_left_out": 1})
    calls = _recorded(made, "checkpointer", "_arm", "optimizers")
    made._update(agreed.norm)
    assert calls.mock_calls == []


def test_an_update_has_its_parts_in_this_order():
    """The arm sees clipped gradients, and an asynchronous save has copied the weights before they change."""
    made = _made(_clip=mock.Mock())
    made.optimizers.skips_step, norm = False, torch.tensor(3.0)
    calls = _recorded(made, "_clip", "checkpointer", "_arm", "optimizers")
    made._update(norm)
    assert calls.mock_calls == [
        call._clip(norm), call.checkpointer.maybe_wait_for_staging(), call._arm.before_step(3), call.optimizers.step(),
        call._arm.after_step(3),
    ]  # fmt: skip


def test_clipping_takes_the_same_operations_for_any_number_of_gradients():
    parts = [nn.ParameterList([torch.zeros(2) for _ in range(20)]) for _ in range(2)]
    for parameter in (parameters := [p for part in parts for p in part]):
        parameter.grad = torch.tensor([3.0, 4.0])
    made = _made(model_parts=parts)
    made.config.training.max_norm = 2.5
    with Operations() as operations:
        made._clip(torch.tensor(5.0))
    # torch adds 1e-6 to the norm
    assert all(p.grad.tolist() == pytest.approx([1.5, 2.0], rel=1e-6) for p in parameters)
    assert operations.count < 10


def _log(is_logged: bool, is_due: bool) -> tuple[mock.Mock, list]:
    """(calls of the metrics processor, what this rank sends) on two ranks, of which this one's loss is 0.1."""
    made, sent = _made(), []
    names = ["loss", *PCMetricsProcessor.NUMBERS, "theirs"]
    numbers = torch.tensor([[0.1, 1.0, 2.0, 3.0, 8.0, 5.0], [0.2, 4.0, 5.0, 6.0, 9.0, 7.0]], dtype=torch.float64)

    def gather(own):
        sent.extend(torch.cat(own).tolist())
        return OfRanks(names, numbers)

    made._rank_numbers = SimpleNamespace(gather=gather)
    made._output_times.take.return_value = 0.25
    made.optimizers.pc_times = create_autospec(Spans, instance=True)
    made.optimizers.pc_times.take.return_value = 0.125
    made.optimizers.rate.return_value = 1e-3
    made.diagnostics.is_due.return_value = is_due
    made.diagnostics.measure.return_value = [torch.tensor([5.0])]
    made.diagnostics.collect.side_effect = lambda step, of_ranks: {"theirs": of_ranks.sums()["theirs"]}
    processor = made.metrics_processor
    processor.NUMBERS = PCMetricsProcessor.NUMBERS
    processor.should_log.return_value = is_logged
    processor.own_numbers.side_effect = lambda *seconds: [1.0, 2.0, *seconds]
    processor.add_numbers.side_effect = lambda of_ranks: {"memory": of_ranks[:, 0].max().item()}
    made._log(torch.tensor(0.5), 5.0)
    return processor, sent


def test_a_step_is_logged_with_the_numbers_of_all_ranks():
    processor, sent = _log(is_logged=True, is_due=False)
    assert sent == [0.5, 1.0, 2.0, 0.25, 0.125, 5.0]
    loss = torch.tensor(0.1 + 0.2, dtype=torch.float32).item() / 5  # tensor-parallel ranks have the same
    largest = 0.2 * 4 * 3  # of 4 parts of the batch, and of 3 of a sequence
    processor.log.assert_called_once_with(3, loss, largest, 5.0, extra_metrics={"lr": 1e-3, "memory": 4.0})
    processor.log_metrics.assert_called_once_with(3, {"theirs": 12.0})


def test_diagnostics_alone_leave_the_numbers_of_the_next_logged_step():
    processor, sent = _log(is_logged=False, is_due=True)
    assert sent == [0.5, 0.0, 0.0, 0.0, 0.0, 5.0]
    processor.own_numbers.assert_not_called()
    processor.log.assert_not_called()
    processor.log_metrics.assert_called_once_with(3, {"theirs": 12.0})


def test_nothing_is_exchanged_if_nothing_is_due():
    processor, sent = _log(is_logged=False, is_due=False)
    assert not sent and not processor.log_metrics.called


@pytest.mark.parametrize(
    "enable, step, stop_agreed, validates",
    [(True, 4, False, True), (True, 3, False, False), (False, 4, False, False), (True, 4, True, False),
     (True, 10, True, True)],
)  # fmt: skip
def test_a_validation_is_left_out_when_a_run_stops_before_its_last_step(enable, step, stop_agreed, validates):
    made = _made(step=step, _stop_agreed=stop_agreed)
    made.config.validation.enable = enable
    made.validator.is_due.side_effect = lambda step: step in (4, 10)
    calls = _recorded(made, "metrics_processor", "validator")
    made._validate()
    calls.validator.is_due.reset_mock()
    expected = [call.metrics_processor.pause(), *([call.validator.validate(made)] if validates else [])]
    assert [one for one in calls.mock_calls if "is_due" not in one[0]] == expected


def test_the_first_step_of_a_start_ends_with_the_timeouts():
    made = _made(_has_stepped=False, _set_timeouts=mock.Mock())
    made.metrics_processor.progress = create_autospec(Progress, instance=True)
    made._end_step()
    assert made._set_timeouts.mock_calls == [call()]
    made._end_step()
    assert made._set_timeouts.mock_calls == [call()]
    assert made.metrics_processor.progress.show.mock_calls == [call(3), call(3)]


@pytest.mark.parametrize("is_public", [False, True])
def test_all_groups_but_fake_ones_get_the_timeout_once_all_ranks_are_there(monkeypatch, one_process, is_public):
    """By torch's public function, if there is one."""
    made, waited, public = _made(), [], []
    made.checkpointer.group = object()
    made.config.comm.train_timeout_seconds = 77
    fake = dist.new_group(backend="fake")
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    monkeypatch.setattr(dist, "barrier", lambda group=None: waited.append(group))
    if is_public:
        monkeypatch.delattr(distributed_c10d, "_set_pg_timeout")
        monkeypatch.setattr(dist, "set_timeout", lambda *given: public.append(given), raising=False)
    made._set_timeouts()
    assert waited == [made.checkpointer.group]
    if is_public:
        assert {group for _, group in public} == {*groups} and fake not in {*groups}
        found = [timeout.seconds for timeout, _ in public]
    else:
        found = [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in groups]
    assert found == [77, 77]


# --- a run ------------------------------------------------------------------------------------------


@pytest.fixture
def kept_signal():
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def start(monkeypatch, tmp_path, one_process, kept_signal, said):
    """start(loaded, step, stops=False) -> (recorded steps, states in status.json while it trains and afterwards); `loaded` is
    a folder, nothing, or the error that refuses it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "loss": 1.0}\n')
    held = lock(tmp_path)  # else the state would read as "interrupted"

    def run(loaded: str | UserError, step: int, stops: bool = False):
        made, recorded, states = _made(step=0), [], []
        made.config.job.dump_folder = str(tmp_path)
        made.metrics_processor.device_memory_monitor = SimpleNamespace(device_name="CPU")
        made.dataloader.manifests, made.checkpointer.folder = ["first", "second"], tmp_path / "checkpoint"

        def load(*given):
            assert given == (made.config, made._batches, "first", made.checkpointer, made.optimizers)
            if isinstance(loaded, UserError):
                raise loaded
            made.step = step
            return Path(loaded) if loaded else None

        def train(self):
            assert self is made and torchtitan.train.dist_utils.set_pg_timeouts is module._nothing
            states.append(asdict(read_state(tmp_path)))
            made.step, made.stopped = 10, stops

        monkeypatch.setattr(module.start, "load", load)
        monkeypatch.setattr(torchtitan.train.Trainer, "train", train)
        made.train(recorded.append)
        return recorded, [*states, asdict(read_state(tmp_path))]

    yield run
    held.close()


@pytest.mark.parametrize(
    "loaded, step, recorded", [("", 0, 0), ("{own}/checkpoint/step-3", 3, 3), ("{own}/other/step-3", 3, 0)]
)
def test_a_start_records_what_it_continues(start, tmp_path, said, loaded, step, recorded):
    """A run that begins with all of another's checkpoint is a new one."""
    found, states = start(loaded.format(own=tmp_path), step)
    assert found == [recorded]
    assert states == [
        {"state": "running", "step": step, "steps": 10, "reason": ""},
        {"state": "finished", "step": 10, "steps": 10, "reason": ""},
    ]
    assert not read_log(tmp_path).lines  # step 6 is trained again
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    assert f": steps {step + 1} to 10 of 24 sequences of 16 tokens, 3 micro-batches of 2 on each of 1 x CPU" in said[0]


def test_a_run_that_was_asked_to_stop_says_so(start):
    _, states = start("", 0, stops=True)
    assert states[-1] == {"state": "stopped", "step": 10, "steps": 10, "reason": "asked to stop"}


def test_a_checkpoint_after_the_last_step_is_refused_before_anything_is_written(start, tmp_path):
    with pytest.raises(UserError, match=r"training.steps = 10 is below step 11 of .*step-11, which this run continues"):
        start(f"{tmp_path}/checkpoint/step-11", 11)
    assert not (tmp_path / "status.json").exists() and len(read_log(tmp_path).lines) == 1
    assert start(f"{tmp_path}/checkpoint/step-10", 10)[0] == [10]  # control


def test_a_start_that_is_refused_writes_nothing(start, tmp_path):
    with pytest.raises(UserError, match="of another method"):
        start(UserError("of another method"), 0)
    assert not (tmp_path / "status.json").exists() and len(read_log(tmp_path).lines) == 1


def test_other_ranks_write_nothing(start, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert start("", 0)[0] == [] and not (tmp_path / "status.json").exists()


def _continues(monkeypatch, others_wish=False, skips_step=False, **attributes) -> tuple[Trainer, bool]:
    """Whether a run goes on; other ranks may wish to stop before the first step."""

    def all_reduce(tensor, operation, group):
        assert tensor.dtype == torch.int and operation == dist.ReduceOp.MAX  # gloo has no maximum of booleans
        assert group is made.checkpointer.group
        tensor.fill_(max(int(tensor), others_wish))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    made = _made(job_config=SimpleNamespace(training=SimpleNamespace(steps=10)), **attributes)
    made.checkpointer.group, made.checkpointer.enable = object(), True
    made.checkpointer.call_together.side_effect = lambda function: function()
    made.optimizers.skips_step = skips_step
    return made, made.should_continue_training()


@pytest.mark.parametrize("own, others, stops", [(False, False, False), (True, False, True), (False, True, True)])
def test_before_the_first_step_all_ranks_learn_of_a_request_to_stop(monkeypatch, said, own, others, stops):
    made, continues = _continues(monkeypatch, others, _has_stepped=False, _stop_requested=own)
    assert (made.stopped, continues) == (stops, not stops)


@pytest.mark.parametrize(
    "agreed, skips, stops", [(False, False, False), (False, True, False), (True, False, True), (True, True, False)]
)
def test_a_run_stops_with_a_checkpoint_after_a_step_that_was_not_skipped(monkeypatch, said, agreed, skips, stops):
    """Later a request counts once the last step's exchange has told all ranks of it."""
    made, continues = _continues(monkeypatch, others_wish=True, _stop_agreed=agreed, skips_step=skips)
    assert (made.stopped, continues) == (stops, not stops)
    assert made.checkpointer.save_and_stop.mock_calls == ([call(3)] if stops else [])
    assert said == (["Asked to stop: saving step 3"] if stops else [])


def test_a_run_without_checkpoints_says_that_nothing_is_saved(monkeypatch, said):
    made, _ = _continues(monkeypatch, _stop_agreed=True)
    made.checkpointer.enable = False
    made.should_continue_training()
    assert said[-1] == "Asked to stop: checkpoint.enable = false, so nothing is saved of step 3"


def test_a_run_ends_after_its_last_step(monkeypatch):
    made, continues = _continues(monkeypatch, step=10, _stop_agreed=True)
    assert not continues and not made.stopped


def test_a_rank_without_data_ends_the_run_after_the_checkpoint(monkeypatch, said):
    error = UserError("the disk is gone")
    with pytest.raises(UserError, match="the disk is gone"):
        _continues(monkeypatch, _stop_agreed=True, _data_error=error)
    assert said == ["Asked to stop: saving step 3"]
    assert _continues(monkeypatch, _data_error=error)[1]  # control: it is not agreed yet


def test_tokens_are_counted_over_all_ranks_and_resumed_on_another_number():
    made = _made(step=7, ntokens_seen=96)
    state = made.state_dict()
    assert state == {"step": 7, "ntokens_seen": 96 * 4}
    half = Degrees(**asdict(DEGREES) | {"dp_replicate": 1, "world_size": 30})
    resumed = _made(step=0, _batches=RankBatches(half, made.config.training))
    resumed.load_state_dict(state)
    assert (resumed.step, resumed.ntokens_seen) == (7, 96 * 2) and type(resumed.ntokens_seen) is int


def test_names_are_replaced_for_a_while():
    owner = SimpleNamespace(name=1, other=2)
    with pytest.raises(KeyError), replaced(owner, name=3):
        assert vars(owner) == {"name": 3, "other": 2}
        raise KeyError
    assert vars(owner) == {"name": 1, "other": 2}


# --- the start of a process -------------------------------------------------------------------------


@pytest.fixture
def constructed(monkeypatch, one_process, kept_signal):
    """A trainer whose model and optimizers TorchTitan has made, as the third of four ranks, in a pipeline of two stages."""
    config, order = Config(), []
    theirs = (torchtitan.train.CheckpointManager, torchtitan.train.ensure_pp_loss_visible)

    def construct(self, job_config):
        assert job_config.ours is config and order == ["device"]
        assert torchtitan.train.CheckpointManager is Checkpoints
        assert torchtitan.train.ensure_pp_loss_visible is module._nothing
        self.model_parts = [Llama2(tiny.model_args("tiny", vocab_size=8, max_seq_len=16))]
        self.parallel_dims = SimpleNamespace(world_size=4, pp=2)
        self.optimizers = SimpleNamespace(preconditioner=None)
        self.metrics_processor = SimpleNamespace(NUMBERS=PCMetricsProcessor.NUMBERS)
        self.device = torch.device("cpu")

    monkeypatch.setattr(module.cpu, "use_cpu_where_there_is_no_gpu", lambda: order.append("device"))
    monkeypatch.setattr(torchtitan.train.Trainer, "__init__", construct)
    made = Trainer(config)
    assert (torchtitan.train.CheckpointManager, torchtitan.train.ensure_pp_loss_visible) == theirs
    return made


def test_a_trainer_starts_without_a_request_and_notes_the_signal(constructed):
    assert not constructed.stopped and not constructed._stop_requested
    assert not constructed._stop_agreed and not constructed._has_stepped
    os.kill(os.getpid(), signal.SIGUSR2)
    assert constructed._stop_requested is True


def test_numbers_are_sums_over_the_ranks_of_a_pipeline_stage(constructed):
    (model,) = constructed.model_parts
    squares = sum(parameter.detach().double().square().sum() for parameter in model.parameters())
    # each of the stage's two ranks has all of the model and half of the sum; float64 sums in another order
    torch.testing.assert_close(constructed._squared_norm.of_parameters(set()), squares / 2, rtol=1e-12, atol=0)
    own = torch.arange(1.0, 2 + len(PCMetricsProcessor.NUMBERS))
    names = ["loss", *PCMetricsProcessor.NUMBERS]
    of_ranks = constructed._rank_numbers.gather([own, *constructed.diagnostics.measure(3)])
    assert of_ranks.of(*names).tolist() == [own.tolist()]


@pytest.fixture
def of_eight(monkeypatch):
    """of_eight(**settings): `init_distributed` of one of eight ranks, with what it called."""

    def init(profiling: bool = False):
        calls, config = mock.Mock(), Config()
        config.parallelism.tensor_parallel_degree, config.profiling.enable_profiling = 2, profiling
        calls.init_distributed.return_value = 8
        for name in ("init_distributed", "require_agreement"):
            monkeypatch.setattr(module, name, getattr(calls, name))
        made = _made(config=config, job_config=SimpleNamespace(comm="comm"))
        return made.init_distributed(), made, calls.mock_calls

    return init


def test_ranks_agree_before_they_build_a_mesh_in_which_all_are_sharded(of_eight):
    dims, made, calls = of_eight()
    assert calls == [
        call.init_distributed("comm", base_folder=made.config.job.dump_folder),
        call.require_agreement(made.config),
    ]
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size")
    assert [getattr(dims, name) for name in names] == [1, 4, 1, 2, 1, 1, 1, 8] and dims.fsdp_enabled
    assert made._batches.data_ranks == 4


def test_what_these_ranks_cannot_do_is_refused(of_eight):
    with pytest.raises(UserError, match="profiling.enable_profiling needs a GPU"):
        of_eight(profiling=True)
