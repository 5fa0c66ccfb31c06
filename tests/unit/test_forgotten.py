"""Every forgotten call and its error: no use of the public API silently trains a plain model."""

import copy
import itertools
import re
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import pc
from helpers.toy import toy_batch, toy_loss, toy_model
from pc import PCConfig, StepSchedule, UserError


class Loop:
    """The parts of a training loop on the toy model; a test leaves one out."""

    def __init__(self, schedule="step", follow=True, make=lambda p: torch.optim.AdamW(p, lr=1e-2)):
        self.model = pc.attach(toy_model(), PCConfig(schedule=schedule))
        self.optimizer = make(self.model.parameters())
        self.schedule = None
        if schedule == "step":
            self.schedule = StepSchedule(self.model, *([self.optimizer] if follow else []))

    def backward(self, batch=0):
        toy_loss(self.model, toy_batch(batch)).backward()

    def step(self, batch=0):
        self.backward(batch)
        if self.schedule:
            self.schedule.pull_back()
        self.optimizer.step()
        self.optimizer.zero_grad()


def no_schedule():
    model = pc.attach(toy_model(), PCConfig(schedule="step"))
    toy_loss(model, toy_batch(0)).backward()


def no_materialise():
    Loop(follow=False).backward()


def no_pull_back():
    loop = Loop()
    loop.backward()
    loop.optimizer.step()


def no_pull_back_by_hand():
    loop = Loop(follow=False)
    loop.schedule.materialise()
    loop.backward()
    loop.schedule.restore_raw()


def no_restore():
    loop = Loop(follow=False)
    loop.schedule.materialise()
    loop.backward()
    loop.schedule.pull_back()
    loop.optimizer.step()


def no_materialise_after_the_step():
    loop = Loop(follow=False)
    loop.schedule.materialise()
    loop.backward()
    loop.schedule.pull_back()
    loop.schedule.restore_raw()
    loop.optimizer.step()
    loop.backward()


def another_optimizer():
    loop = Loop()
    loop.backward()
    torch.optim.SGD(loop.model.parameters(), lr=0.1).step()


def pull_back_twice():
    loop = Loop()
    loop.backward()
    loop.schedule.pull_back()
    loop.schedule.pull_back()


def pull_back_per_micro_batch():
    loop = Loop()
    for batch in range(2):
        loop.backward(batch)
        loop.schedule.pull_back()


def pull_back_before_backward():
    Loop().schedule.pull_back()


def one_of_two_optimizers_does_not_step():
    model = pc.attach(toy_model(), PCConfig(schedule="step"))
    one, other = (torch.optim.SGD([p for p in model.parameters() if p.ndim == n], lr=0.1) for n in (2, 1))
    schedule = StepSchedule(model, one, other)
    toy_loss(model, toy_batch(0)).backward()
    schedule.pull_back()
    one.step()
    model(toy_batch(0))


def optimizer_before_attach():
    model = toy_model()
    optimizer = torch.optim.AdamW(model.parameters())
    pc.attach(model, PCConfig(schedule="step"))
    StepSchedule(model, optimizer)


def optimizer_of_another_model():
    model = pc.attach(toy_model(), PCConfig(schedule="step"))
    StepSchedule(model, torch.optim.AdamW(toy_model().parameters()))


def schedule_without_attach():
    model = toy_model()
    StepSchedule(model, torch.optim.AdamW(model.parameters()))


def schedule_of_a_forward_model():
    StepSchedule(Loop("forward").model)


def schedule_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    StepSchedule(pc.attach(model, PCConfig(blocks=("0*",), schedule="step")))


def forward_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    pc.attach(model, PCConfig(blocks=("0*",))).to_empty(device="cpu")(torch.ones(3))


def second_schedule():
    loop = Loop()
    StepSchedule(loop.model, loop.optimizer)


def copied_model_trained_on():
    model = copy.deepcopy(Loop().model)
    toy_loss(model, toy_batch(0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def schedule_of_a_copy():
    model = copy.deepcopy(Loop().model)
    StepSchedule(model, torch.optim.SGD(model.parameters(), lr=0.1))


def weights_loaded_without_the_schedule():
    loop = Loop()
    loop.model.load_state_dict(Loop().model.state_dict())
    loop.backward()


def schedule_loaded_without_the_weights():
    loop = Loop()
    loop.schedule.load_state_dict(Loop().schedule.state_dict())
    loop.backward()


def state_while_the_optimizer_steps():
    loop = Loop()
    loop.schedule.restore_raw()
    loop.schedule.state_dict()


def merge_before_the_schedule():
    pc.merge(pc.attach(toy_model(), PCConfig(schedule="step")))


def merge_before_materialise():
    pc.merge(Loop(follow=False).model)


def attach_after_ddp():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = toy_model()
    pc.attach(wrapped, PCConfig())


@pytest.mark.parametrize(
    "forget, said",
    [
        (no_schedule, "it has no pc.StepSchedule; call pc.StepSchedule(model, optimizer)"),
        (no_materialise, "call schedule.materialise()"),
        (no_pull_back, "AdamW.step() without schedule.pull_back()"),
        (no_pull_back_by_hand, "call schedule.pull_back() first"),
        (no_restore, "would train PC(W) of 0.attention.wo instead of W: .*schedule.restore_raw() before it"),
        (no_materialise_after_the_step, "call schedule.materialise()"),
        (another_optimizer, "SGD.step() without schedule.pull_back()"),
        (pull_back_twice, "once per step"),
        (pull_back_per_micro_batch, "after the last micro-batch"),
        (pull_back_before_backward, "call it after backward()"),
        (one_of_two_optimizers_does_not_step, "not every optimizer given to its pc.StepSchedule has stepped"),
        (optimizer_before_attach, "no optimizer given to pc.StepSchedule holds 0.attention.wo.gamma"),
        (optimizer_of_another_model, "no optimizer given to pc.StepSchedule holds 0.attention.wo.weight"),
        (schedule_without_attach, "no PC layer; first pc.attach"),
        (schedule_of_a_forward_model, 'pc.StepSchedule needs "step"'),
        (schedule_on_the_meta_device, "meta device; create pc.StepSchedule after"),
        (forward_on_the_meta_device, "meta device; call pc.refresh(model)"),
        (second_schedule, "another pc.StepSchedule holds its W"),
        (copied_model_trained_on, "to copy a model: copy.deepcopy((model, optimizer, schedule))"),
        (schedule_of_a_copy, "copy.deepcopy((model, optimizer, schedule))"),
        (weights_loaded_without_the_schedule, "call schedule.load_state_dict()"),
        (schedule_loaded_without_the_weights, "call model.load_state_dict()"),
        (state_while_the_optimizer_steps, "call materialise() first"),
        (merge_before_the_schedule, "pc.merge cannot get PC(W) of 0.attention.wo: it has no pc.StepSchedule"),
        (attach_after_ddp, "call pc.attach before DDP"),
        (merge_before_materialise, "pc.merge cannot get PC(W) of 0.attention.wo: it holds W"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_forgotten_is_said(forget, said):
    pattern = ".*".join(re.escape(part) for part in said.split(".*"))
    with pytest.raises(UserError, match=pattern) as raised:
        forget()
    assert len(str(raised.value).splitlines()) == 1


def test_gammas_that_no_optimizer_trains_are_warned_of_once():
    model = toy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pc.attach(model, PCConfig())
    with pytest.warns(UserWarning, match="no optimizer trains the gammas") as warned:
        for _ in range(3):
            toy_loss(model, toy_batch(0)).backward()
            optimizer.step()
    assert {str(w.message) for w in warned} == {str(warned[0].message)}
    with warnings.catch_warnings(action="error"):  # two optimizers
        model = pc.attach(toy_model(), PCConfig())
        optimizers = [torch.optim.SGD([p for p in model.parameters() if p.ndim == n], lr=0.1) for n in (2, 1)]
        for _ in range(3):
            toy_loss(model, toy_batch(0)).backward()
            for optimizer in optimizers:
                optimizer.step()


CALLS = ("schedule", "materialise", "backward", "pull_back", "restore_raw", "step", "materialise")


@pytest.mark.parametrize("follow", [True, False])
def test_no_subset_of_calls_trains_a_plain_model(follow):
    """Three rounds of a loop without any subset of its calls raise an error, give the result of the complete loop, or
    leave W unchanged."""
    whole = ("backward", "pull_back", "step") if follow else CALLS[2:]

    def train(made, first, calls):
        model = pc.attach(toy_model(), PCConfig(schedule="step"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = StepSchedule(model, *([optimizer] if follow else [])) if made else None
        actions = {
            "backward": lambda: toy_loss(model, toy_batch(0)).backward(),
            "step": optimizer.step,
            **{name: getattr(schedule, name, None) for name in ("pull_back", "restore_raw", "materialise")},
        }
        if first and schedule and not follow:
            schedule.materialise()
        for _ in range(3):
            for call in calls:
                if actions[call]:
                    actions[call]()
            optimizer.zero_grad()
        raw = {f"{name}.weight": state.raw for name, state in schedule.layers.items()} if schedule else {}
        return {name: p.detach().clone() for name, p in (dict(model.named_parameters()) | raw).items()}

    expected = train(True, True, whole)
    start = toy_model().state_dict()
    errors = unmoved = equal = 0
    for made, first in itertools.product((True, False), repeat=2):
        for kept in itertools.product((True, False), repeat=len(whole)):
            calls = tuple(itertools.compress(whole, kept))
            try:
                result = train(made, first, calls)
            except UserError:
                errors += 1
                continue
            if all(torch.equal(result[name], start[name]) for name in start):
                unmoved += 1
                continue
            assert all(torch.equal(result[name], tensor) for name, tensor in expected.items()), (made, first, calls)
            equal += 1
    assert errors and unmoved and equal


@pytest.mark.parametrize("schedule", ["forward", "step"])
def test_copies_go_on_as_the_originals_do(schedule):
    """Copied together they train equally, with separate weights; a copy of the model alone can only be evaluated."""
    original = Loop(schedule)
    original.step(0)
    alone = copy.deepcopy(original.model)
    assert torch.equal(alone(toy_batch(0)), original.model(toy_batch(0)))
    twin = Loop.__new__(Loop)
    twin.model, twin.optimizer, twin.schedule = copy.deepcopy((original.model, original.optimizer, original.schedule))
    for loop in (original, twin):
        for batch in (1, 2):
            loop.step(batch)
    for (name, tensor), other in zip(
        original.model.state_dict().items(), twin.model.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, other) and tensor.data_ptr() != other.data_ptr(), name
    assert not torch.equal(alone(toy_batch(0)), original.model(toy_batch(0)))  # control: training went on


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)])
@pytest.mark.parametrize("schedule", ["forward", "step"])
def test_the_step_that_creates_optimizer_state_moves_nothing(schedule, make):
    """torch.distributed.checkpoint makes such a step, with zero gradients and lr 0, before the first real one."""
    loop = Loop(schedule, make=make)
    before = copy.deepcopy([loop.model.state_dict(), loop.schedule.state_dict() if loop.schedule else {}])
    get_optimizer_state_dict(loop.model, loop.optimizer)
    after = [loop.model.state_dict(), loop.schedule.state_dict() if loop.schedule else {}]
    equal = torch.utils._pytree.tree_map(torch.equal, before, after)
    assert all(torch.utils._pytree.tree_leaves(equal))
    loop.step()
    assert not torch.equal(loop.model.state_dict()["0.attention.wo.weight"], before[0]["0.attention.wo.weight"])


@pytest.mark.parametrize("schedule", ["forward", "step"])
def test_a_first_step_of_lr_0_is_a_step(schedule):
    """As in a warm-up from zero: weights stay, vectors advance, and a forgotten pull-back is reported."""
    loop = Loop(schedule, make=lambda p: torch.optim.AdamW(p, lr=0.0))
    vectors = copy.deepcopy({n: getattr(x, "u", None) for n, x in pc.named_pc_linears(loop.model)})
    if schedule == "step":
        loop.backward()
        with pytest.raises(UserError, match="without schedule.pull_back"):
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        vectors = {name: state.u.clone() for name, state in loop.schedule.layers.items()}
    loop.step()
    now = {n: x.u if schedule == "forward" else loop.schedule.layers[n].u for n, x in pc.named_pc_linears(loop.model)}
    assert not any(torch.equal(now[name], u) for name, u in vectors.items())


def test_a_skipped_step_and_one_without_gradients():
    """A loop may skip a step after pull-back (a bad gradient norm), and step an optimizer without gradients."""
    loop, other = Loop(), Loop()
    loop.optimizer.step()
    loop.backward(5)
    loop.schedule.pull_back()
    loop.optimizer.zero_grad()
    for x in (loop, other):
        x.step(1)
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(loop.model.state_dict()[name], tensor), name


def test_an_optimizer_within_another_counts_once():
    """As with sharding wrappers and containers: PC advances once, when the outer step ends."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {"lr": 0.1})

        def step(self, closure=None):
            self.inner.step()

    for schedule in ("forward", "step"):
        plain, nested = Loop(schedule), Loop(schedule)
        nested.optimizer = Outer(nested.optimizer)
        for loop in (plain, nested):
            loop.step(0)
            loop.step(1)
        for name, tensor in plain.model.state_dict().items():
            assert torch.equal(nested.model.state_dict()[name], tensor), (schedule, name)


def test_frozen_layers_stay():
    loop = Loop()
    frozen = loop.model[0].attention["wo"]
    frozen.requires_grad_(False)
    only_gamma = loop.model[1].attention["wo"]
    only_gamma.gamma.requires_grad_(False)
    raw = loop.schedule.layers["0.attention.wo"].raw.clone()
    loop.step()
    assert torch.equal(loop.schedule.layers["0.attention.wo"].raw, raw) and frozen.gamma == 1
    assert only_gamma.gamma == 1 and loop.model[1].feed_forward["w1"].gamma != 1


def test_compiled_models_have_one_graph_and_refuse_too():
    loop = Loop()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loop.model, backend=counter, fullgraph=True)
    reference = Loop()
    for batch in range(3):
        toy_loss(compiled, toy_batch(batch)).backward()
        loop.schedule.pull_back()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        reference.step(batch)
    assert counter.frame_count == 1
    torch.testing.assert_close(compiled(toy_batch(0)), reference.model(toy_batch(0)), rtol=0, atol=1e-9)
    loop.schedule.restore_raw()
    with pytest.raises(Exception, match="not every optimizer"):
        compiled(toy_batch(0))
