"""One training step of TorchTitan's trainer with PC around its optimizer step:

each micro-batch        forward and backward with PC(W)                         TorchTitan, `pc_recipe.train.fsdp_sync`
after the last one      gradients of PC(W) become gradients of W and gamma      `finish_gradients`
                        all ranks learn the gradient norm, whether it is        `pc_recipe.train.rank_sums`
                        finite, and whether to stop; the host waits for this
                        a step that is not finite is left out                   `pc_recipe.train.nonfinite`
                        clipping
optimizers.step()       step of W; then PC(W) is written                        `pc.preconditioner`
logging                 one exchange of all numbers, if any are due; the host   `pc_recipe.train.metrics`,
                        waits for it                                            `pc_recipe.train.diagnostics`

TorchTitan's own step waits in between as well: to count tokens, for each batch that it copies, for each number it logs.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pc.errors import UserError
from pc.integrations.torchtitan_train import Trainer
from pc_recipe.config import Config
from pc_recipe.config.optimizers import KINDS
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.train import fsdp_sync
from pc_recipe.train.arm import make_arm
from pc_recipe.train.checkpoint import Checkpoints
from pc_recipe.train.diagnostics import Diagnostics
from pc_recipe.train.metrics import PCMetricsProcessor
from pc_recipe.train.nonfinite import FiniteSteps
from pc_recipe.train.optimizers import Optimizers
from pc_recipe.train.parallelize import AlwaysSharded
from pc_recipe.train.rank_sums import RankNumbers, SquaredNorm, agree
from pc_recipe.train.slow_ranks import OutputTimes
from pc_recipe.train.upstream_config import JobConfig
from pc_recipe.train.validate import FixedValidator


class StepTrainer(Trainer):
    """TorchTitan's trainer with a step of its own."""

    # what TRAIN_SPEC and this class make of TorchTitan's annotations
    checkpointer: Checkpoints
    metrics_processor: PCMetricsProcessor
    optimizers: Optimizers
    parallel_dims: AlwaysSharded
    # TorchTitan's base classes ask for more than its trainer calls
    dataloader: GlobalOrderLoader  # type: ignore[assignment]
    validator: FixedValidator  # type: ignore[assignment]

    _stop_requested = False
    """on this rank"""
    _stop_agreed = False
    """on any rank, before the last update"""
    _data_error: UserError | None = None
    """why this rank has no data for the next step"""
    _has_stepped = False

    def __init__(self, config: Config) -> None:
        self.config = config
        super().__init__(JobConfig(config))
        parts, dims = self.model_parts, self.parallel_dims
        self.metrics_processor.tokens = lambda: self.ntokens_seen * self._data_ranks
        self.metrics_processor.positions = self._positions
        self.metrics_processor.output_seconds = OutputTimes(parts).take
        self.diagnostics = Diagnostics(config, parts, self.preconditioner, dims)
        self.arm = make_arm(parts, self.optimizers, config)
        self.finite_steps = FiniteSteps(parts, self.preconditioner, config.training.max_nonfinite_steps)
        self._norm = SquaredNorm(parts, dims.world_size // dims.pp)
        own = [(name, 1.0) for name in ("loss", *self.metrics_processor.NUMBERS)]
        self._rank_numbers = RankNumbers(own + self.diagnostics.factors, self.device)

    def train_step(self, data_iterator) -> None:
        self.begin_step()
        self.optimizers.zero_grad()
        schedule: Any = self.lr_schedulers.schedulers[0]  # all are alike
        peak = KINDS[self.config.optimizer.name].lr(self.config.optimizer)  # without `lr_factors`
        learning_rate = peak * schedule.lr_lambdas[0](schedule.last_epoch)
        loss = self._run_micro_batches(data_iterator)
        grad_norm = self._update(loss)
        self._log(loss, grad_norm, learning_rate)

    def begin_step(self) -> None:
        super().begin_step()
        self._first_position = self.dataloader.position
        self.diagnostics.begin_step(self.step, measure_outputs=not self._pipeline_finds_shapes())

    def _run_micro_batches(self, batches: Iterator) -> Tensor:
        """Accumulate gradients; returns this rank's part of the mean loss over the tokens of all ranks."""
        losses = []
        for _ in range(self.gradient_accumulation_steps):
            inputs, labels = next(batches)
            # in training all labels count
            tokens = labels.numel() * self.gradient_accumulation_steps * self._data_ranks
            # Not blocking: from pageable memory the host waits for the copy, from pinned memory for nothing.
            loss = self.forward_backward_step(
                input_dict={name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()},
                labels=labels.to(self.device, non_blocking=True),
                global_valid_tokens=tokens,
            )
            losses.append(loss.detach())
        if self.parallel_dims.pp_enabled and not self.pp_has_last_stage:
            return torch.zeros((), device=self.device)  # it has no loss; TorchTitan returns -1
        total = torch.sum(torch.stack(losses))
        return total.full_tensor() if isinstance(total, DTensor) else total

    def forward_backward_step(self, **batch) -> Tensor:
        is_first, is_last = self._micro_batches_done == 0, self.is_last_micro_batch
        if (is_first or is_last) and not self.parallel_dims.pp_enabled:  # each call walks through all modules
            fsdp_sync.prepare_micro_batch(self.model_parts, self.parallel_dims.once_per_step, is_last)
        return super().forward_backward_step(**batch)

    def _update(self, loss: Tensor) -> float:
        """Clip and step, unless loss or gradients are not finite; returns the gradient norm."""
        if self.step < self.config.training.steps:
            begin = time.perf_counter()
            self._data_error = self.dataloader.look_ahead(self.gradient_accumulation_steps)
            self.metrics_processor.data_loading_times[-1] += time.perf_counter() - begin
        wishes = [self._stop_requested or self._data_error is not None, self.checkpointer.minutes_are_over()]
        agreed = agree(self._norm.of_gradients(), loss, wishes)
        self._stop_agreed, self.checkpointer.is_due = agreed.wishes
        self.optimizers.skips_step = self.finite_steps.skips(self.step, agreed.is_finite, self._positions())
        if self.optimizers.skips_step:
            self.metrics_processor.log_metrics(self.step, {"steps_left_out": self.finite_steps.count})
        self._clip(agreed.norm)
        self.checkpointer.maybe_wait_for_staging()
        stepping = not self.optimizers.skips_step
        if stepping:
            self.arm.before_step(self.step)
        self.optimizers.step()
        if stepping:
            self.arm.after_step(self.step)
        self.lr_schedulers.step()
        return agreed.logged_norm

    def _clip(self, norm: Tensor) -> None:
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.training.max_norm, norm, foreach=True)

    def _log(self, loss: Tensor, grad_norm: float, learning_rate: float) -> None:
        """What is due after this step."""
        processor, dims = self.metrics_processor, self.parallel_dims
        is_logged = processor.should_log(self.step)
        if not is_logged and not self.diagnostics.is_due(self.step):
            return
        times = torch.tensor(processor.own_numbers() if is_logged else [0.0] * len(processor.NUMBERS))
        own = [loss.reshape(1), times.to(self.device, non_blocking=True), *self.diagnostics.measure(self.step)]
        of_ranks = self._rank_numbers.gather(own)
        if is_logged:
            losses = of_ranks.of("loss")
            processor.log(
                self.step,
                # as the sum of a rank's micro-batches is rounded; TP's ranks have the same tokens
                losses.sum().float().item() / dims.tp,
                losses.max().item() * self._data_ranks * dims.cp,
                grad_norm,
                extra_metrics={
                    "n_tokens_seen": self.ntokens_seen * self._data_ranks,
                    "lr": learning_rate,
                    **processor.add_numbers(of_ranks.of(*processor.NUMBERS)),
                },
            )
        processor.log_metrics(self.step, self.diagnostics.collect(self.step, of_ranks))

    def finish_gradients(self, global_valid_tokens: Tensor | int) -> None:
        """Make a step's gradients those of the mean loss, then those of W and gamma."""
        if self.parallel_dims.pp_enabled:
            # With pipeline parallelism, TorchTitan 0.2.2 does not divide by the token count.
            torch._foreach_div_(self._norm.gradients(), global_valid_tokens)
        self.diagnostics.begin_update(self.step)
        super().finish_gradients(global_valid_tokens)

    def _pipeline_finds_shapes(self) -> bool:
        """Whether the pipeline will first infer shapes with uninitialised inputs: at the start and after validation."""
        if not self.parallel_dims.pp_enabled:
            return False
        validated = self.config.validation.enable and self.validator.is_due(self.step - 1)
        return not self._has_stepped or validated

    def _positions(self) -> range:
        """Of the current step's sequences in the order of the data."""
        return range(self._first_position, self.dataloader.position)

    @property
    def _data_ranks(self) -> int:
        return self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard
