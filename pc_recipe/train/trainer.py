"""A run: TorchTitan's trainer with a step of its own. `pc_recipe.runs.worker` is the command, and `pc_recipe.train.start`
loads what a run begins with.

A step, as `Trainer.train_step` has it:

each micro-batch     forward and backward with PC(W)                             TorchTitan, `pc_recipe.train.fsdp_sync`
gradients            those of PC(W) become those of W and gamma                  `pc.preconditioner`
agree                all ranks learn the gradient norm, whether it is finite,    `pc_recipe.train.rank_sums`
                     and whether to stop; the host waits for this
skip                 a step that is not finite makes no update                   `pc_recipe.train.nonfinite`
update               clipping; step of W, after which PC(W) is written           `pc_recipe.train.optimizers`
log                  one exchange of all numbers, if any are due; the host       `pc_recipe.train.metrics`,
                     waits for it                                                `pc_recipe.train.diagnostics`
validate             before TorchTitan saves the step's checkpoint               `pc_recipe.train.validate`

TorchTitan's own step also waits in between: to count tokens, for each batch that it copies, for each number it logs.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.train
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torchtitan.distributed.utils import init_distributed
from torchtitan.tools.logging import logger

from pc.errors import UserError
from pc_recipe.config import Config, rules
from pc_recipe.config.headline import headline
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.files.run_folder import write_state
from pc_recipe.files.run_log import note_start
from pc_recipe.train import cpu, fsdp_sync, start, train_spec  # noqa: F401 (it registers itself)
from pc_recipe.train.arm import make_arm
from pc_recipe.train.checkpoint import Checkpoints
from pc_recipe.train.diagnostics import Diagnostics
from pc_recipe.train.environment import require_agreement
from pc_recipe.train.metrics import PCMetricsProcessor
from pc_recipe.train.nonfinite import FiniteSteps
from pc_recipe.train.optimizers import Optimizers
from pc_recipe.train.parallelize import AlwaysSharded
from pc_recipe.train.rank_sums import Agreement, RankNumbers, SquaredNorm, agree
from pc_recipe.train.slow_ranks import OutputTimes
from pc_recipe.train.upstream_config import JobConfig
from pc_recipe.train.validate import FixedValidator


class Trainer(torchtitan.train.Trainer):
    """TorchTitan's trainer with PC, a stop signal, and a status file.

    On SIGUSR2 to any rank, all ranks save a checkpoint after the current step and exit normally; after the next one, if
    they have already agreed on the current step's update.
    """

    # the classes that `train_spec` and this class put in the place of TorchTitan's
    checkpointer: Checkpoints
    metrics_processor: PCMetricsProcessor
    optimizers: Optimizers
    parallel_dims: AlwaysSharded
    # TorchTitan's base classes ask for more than its trainer calls
    dataloader: GlobalOrderLoader  # type: ignore[assignment]
    validator: FixedValidator  # type: ignore[assignment]

    def train_step(self, data_iterator: Iterator) -> None:
        self._begin_step()
        loss = self._run_micro_batches(data_iterator)
        self._finish_gradients()
        agreed = self._agree(loss)
        self._update(agreed.norm)
        self._log(loss, agreed.logged_norm)
        self.lr_schedulers.step()
        self._validate()
        self._end_step()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stopped = False
        self._stop_requested = False
        """on this rank"""
        self._stop_agreed = False
        """on any rank, as agreed before the last update"""
        self._data_error: UserError | None = None
        """why this rank has no data for the next step"""
        self._has_stepped = False
        cpu.use_cpu_where_there_is_no_gpu()
        # Before anything slow: the launcher's children ignore the signal until they handle it.
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "_stop_requested", True))
        # All pipeline stages know the loss (`_log`); TorchTitan would warn that rank 0 does not.
        with replaced(torchtitan.train, CheckpointManager=Checkpoints, ensure_pp_loss_visible=_nothing):
            super().__init__(JobConfig(config))
        parts, dims = self.model_parts, self.parallel_dims
        self.preconditioner = self.optimizers.preconditioner
        self.diagnostics = Diagnostics(config, parts, self.preconditioner, dims)
        self._output_times = OutputTimes(parts)
        self._arm = make_arm(parts, self.optimizers, config)
        self._finite_steps = FiniteSteps(parts, self.preconditioner, config.training.max_nonfinite_steps)
        self._squared_norm = SquaredNorm(parts, dims.world_size // dims.pp)
        # name and factor of each number that `_log` sends, in its order
        factors = [(name, 1.0) for name in ("loss", *self.metrics_processor.NUMBERS)]
        self._rank_numbers = RankNumbers(factors + self.diagnostics.factors, self.device)

    def init_distributed(self) -> AlwaysSharded:
        """TorchTitan's, with FSDP on any number of ranks, after all ranks have agreed on what they train."""
        world_size = init_distributed(self.job_config.comm, base_folder=self.config.job.dump_folder)
        require_agreement(self.config)
        self._batches = RankBatches.of(self.config, world_size)
        rules.require(self.config, self._batches.dims, on_cpu=cpu.is_cpu())
        return AlwaysSharded(self._batches)

    # --- a step -------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self.metrics_processor.resume()
        self.optimizers.zero_grad()
        self.diagnostics.begin_step(self.step, measure_outputs=not self._pipeline_finds_shapes())

    def _pipeline_finds_shapes(self) -> bool:
        """Whether the pipeline will first infer shapes with uninitialised inputs: at the start and after validation."""
        if not self.parallel_dims.pp_enabled:
            return False
        validated = self.config.validation.enable and self.validator.is_due(self.step - 1)
        return not self._has_stepped or validated

    def _run_micro_batches(self, batches: Iterator) -> Tensor:
        """Accumulate gradients; returns this rank's part of the mean loss over the tokens of all ranks."""
        losses, last = [], self.gradient_accumulation_steps - 1
        first_position = self.dataloader.position
        for index in range(self.gradient_accumulation_steps):
            inputs, labels = next(batches)
            if index in (0, last) and not self.parallel_dims.pp_enabled:  # each call walks through all modules
                fsdp_sync.prepare_micro_batch(self.model_parts, self.config.parallelism, index == last)
            # Non-blocking: from pageable memory the host still waits for the copy, from pinned memory it does not.
            loss = self.forward_backward_step(
                input_dict={name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()},
                labels=labels.to(self.device, non_blocking=True),
                global_valid_tokens=self._batches.tokens,  # type: ignore[arg-type]  # in training all labels count
            )
            losses.append(loss.detach())
        self.metrics_processor.tokens = self.ntokens_seen * self._batches.data_ranks
        self.metrics_processor.positions = range(first_position, self.dataloader.position)
        if self.parallel_dims.pp_enabled and not self.pp_has_last_stage:
            return torch.zeros((), device=self.device)  # it has no loss; TorchTitan returns -1
        total = torch.sum(torch.stack(losses))
        return total.full_tensor() if isinstance(total, DTensor) else total

    def _finish_gradients(self) -> None:
        """Make a step's gradients those of the mean loss, then those of W and gamma."""
        if self.parallel_dims.pp_enabled:
            # With pipeline parallelism, TorchTitan 0.2.2 does not divide by the token count.
            torch._foreach_div_(self._squared_norm.gradients(), self._batches.tokens)
        self.diagnostics.begin_update(self.step)
        if self.preconditioner is not None:
            self.optimizers.pc_times.begin()
            self.preconditioner.pull_back()
            self.optimizers.pc_times.end()

    def _agree(self, loss: Tensor) -> Agreement:
        """Let all ranks know the gradient norm and whether any wishes to stop or save; decide whether to skip the update."""
        processor = self.metrics_processor
        if self.step < self.config.training.steps:
            begin = time.perf_counter()
            self._data_error = self.dataloader.look_ahead(self.gradient_accumulation_steps)
            processor.data_loading_times[-1] += time.perf_counter() - begin  # of this step's last micro-batch
        wishes = [self._stop_requested or self._data_error is not None, self.checkpointer.minutes_are_over()]
        agreed = agree(self._squared_norm.of_gradients(), loss, wishes)
        self._stop_agreed, self.checkpointer.save_is_due = agreed.wishes
        self.optimizers.skips_step = self._finite_steps.skips(self.step, agreed.is_finite, processor.positions)
        if self.optimizers.skips_step:
            processor.log_metrics(self.step, {"steps_left_out": self._finite_steps.count})
        return agreed

    def _update(self, norm: Tensor) -> None:
        """Clip the gradients, whose norm is `norm`, and step, unless the step is skipped."""
        if self.optimizers.skips_step:
            return
        self._clip(norm)
        self.checkpointer.maybe_wait_for_staging()
        self._arm.before_step(self.step)
        self.optimizers.step()
        self._arm.after_step(self.step)

    def _clip(self, norm: Tensor) -> None:
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.training.max_norm, norm, foreach=True)

    def _log(self, loss: Tensor, grad_norm: float) -> None:
        """Exchange and log the numbers of all ranks, if some are due after this step."""
        processor, dims = self.metrics_processor, self.parallel_dims
        is_logged = processor.should_log(self.step)
        if not is_logged and not self.diagnostics.is_due(self.step):
            return
        numbers = [0.0] * len(processor.NUMBERS)
        if is_logged:
            numbers = processor.own_numbers(self._output_times.take(), self.optimizers.pc_times.take())
        own = torch.tensor(numbers).to(self.device, non_blocking=True)
        of_ranks = self._rank_numbers.gather([loss.reshape(1), own, *self.diagnostics.measure(self.step)])
        if is_logged:
            losses = of_ranks.of("loss")
            processor.log(
                self.step,
                # float32, as each rank's own sum is; tensor-parallel ranks all add the same tokens
                losses.sum().float().item() / dims.tp,
                # a rank's sum is over its part of the sequence, divided by the tokens of all ranks
                losses.max().item() * self._batches.data_ranks * dims.cp,
                grad_norm,
                extra_metrics={
                    "lr": self.optimizers.rate(),
                    **processor.add_numbers(of_ranks.of(*processor.NUMBERS)),
                },
            )
        processor.log_metrics(self.step, self.diagnostics.collect(self.step, of_ranks))

    def _validate(self) -> None:
        """Before the checkpoint of this step, not after it as upstream: a kill in between would lose the validation."""
        self.metrics_processor.pause()
        # A run that was asked to stop does so at once. But after the last step the validation is the run's result.
        has_time = not self._stop_agreed or self.step == self.config.training.steps
        if self.config.validation.enable and self.validator.is_due(self.step) and has_time:
            self.validator.validate(self)

    def _end_step(self) -> None:
        if not self._has_stepped:
            self._set_timeouts()
        self._has_stepped = True
        self.metrics_processor.progress.show(self.step)

    def _set_timeouts(self) -> None:
        """After the first step, set `comm.train_timeout_seconds` for all process groups that it has created.

        TorchTitan does so only after step 1, which a resumed run does not have, and not for the groups of `pc.owner`. It
        uses a private function of torch, which 2.15 replaces by a public one.
        """
        dist.barrier(group=self.checkpointer.group)  # a rank's first step may take longer than the timeout
        timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
        set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
        for group in distributed_c10d._world.pg_map:
            if dist.get_backend(group) != "fake":  # TorchTitan's fake groups of mesh dimensions with one rank
                set_timeout(timeout, group)

    # --- a run --------------------------------------------------------------------------------------

    def train(self, record: Callable[[int], None] = lambda step: None) -> None:
        """Load, and train to the end or to a request to stop.

        Args:
            record: called on rank 0 with the step that this run continues from, 0 for a new one. It is called once nothing
                can refuse this start: the run's record in the folder must not change before.

        Raises:
            UserError: what `start.load` raises; or the loaded step is after the last.
        """
        folder, last = self.config.folder, self.config.training.steps
        loaded = start.load(
            self.config, self._batches, self.dataloader.manifests[0], self.checkpointer, self.optimizers
        )
        if self.step > last:
            raise UserError(
                f"training.steps = {last} is below step {self.step} of {loaded}, which this run continues; raise "
                "it, or go back by moving newer checkpoints out of the folder"
            )
        if dist.get_rank() == 0:
            write_state(folder, "running", self.step, last)
            note_start(folder, self.step)
            record(self.step if loaded and loaded.parent == self.checkpointer.folder else 0)
        logger.info(self._describe_start())
        with replaced(torchtitan.train.dist_utils, set_pg_timeouts=_nothing):  # `_set_timeouts` does it
            super().train()
        # A late request has nothing to stop. At exit Python would restore the default handler, which kills the process.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if dist.get_rank() == 0:
            if self.stopped:
                write_state(folder, "stopped", self.step, last, "asked to stop")
            else:
                write_state(folder, "finished", self.step, last)

    def _describe_start(self) -> str:
        config, device = self.config, self.metrics_processor.device_memory_monitor.device_name
        return (
            f"{headline(config)}: steps {self.step + 1} to {config.training.steps} of {self._batches.sequences} "
            f"sequences of {config.training.seq_len} tokens, {self.gradient_accumulation_steps} micro-batches of "
            f"{config.training.local_batch_size} on each of {dist.get_world_size()} x {device}"
        )

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        if not self._has_stepped:  # later, the last step's exchange has told it
            wish = torch.tensor(self._stop_requested, dtype=torch.int)
            dist.all_reduce(wish, dist.ReduceOp.MAX, group=self.checkpointer.group)
            self._stop_agreed = bool(wish)
        # A skipped step is never saved (`Checkpoints.save`). The request then holds for the next step.
        self.stopped = self._stop_agreed and not self.optimizers.skips_step
        if self.stopped:
            saves = "saving" if self.checkpointer.enable else "checkpoint.enable = false, so nothing is saved of"
            logger.info(f"Asked to stop: {saves} step {self.step}")
            self.checkpointer.save_and_stop(self.step)
        if self._stop_agreed:
            self.checkpointer.call_together(self._require_data)
        return not self.stopped

    def _require_data(self) -> None:
        if self._data_error is not None:
            raise self._data_error

    def state_dict(self) -> dict:
        """TorchTitan's, with the tokens of all ranks, so that a resume on another number of ranks counts correctly."""
        return super().state_dict() | {"ntokens_seen": self.ntokens_seen * self._batches.data_ranks}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.ntokens_seen = state_dict["ntokens_seen"] // self._batches.data_ranks


@contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Give names of a module other values for a while: TorchTitan has no other way to choose them."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _nothing(*_, **__) -> None:
    pass
