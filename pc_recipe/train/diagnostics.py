"""Diagnostics during training: output sizes, gamma, norms, condition numbers, error of the norm estimate.

diagnostics = Diagnostics(config, model_parts, preconditioner, parallel_dims)   # before the first forward
numbers = RankNumbers(diagnostics.factors, device)
for step in ...:
    diagnostics.begin_step(step)
    ...                                  # forward and backward passes
    diagnostics.begin_update(step)
    ...                                  # optimizer, PC(W) written
    of_ranks = numbers.gather(diagnostics.measure(step))        # on every rank, like the next line
    metrics_processor.log_metrics(step, diagnostics.collect(step, of_ranks))
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from pc.blocks import block_of, names_layer
from pc.method import spectral_norm_estimate
from pc.owner import Plan
from pc.preconditioner import Preconditioner
from pc.shards import local
from pc.spectral import modified_condition_number, singular_values
from pc.splits import WeightSplit
from pc.targets import clean_name
from pc.weight import Weight, gamma_values
from pc_recipe.config import Config
from pc_recipe.train.activations import SIZES, OutputSizes
from pc_recipe.train.progress import is_due
from pc_recipe.train.rank_sums import OfRanks, SquaredNorm, share_of
from pc_recipe.train.update_sizes import CHANGE, NORM, UpdateSizes

SPECTRAL: dict[str, Callable[[Tensor], Tensor]] = {
    "condition": modified_condition_number,
}
"""{NAME: function from the ascending singular values [B, min(n, m)] of B effective weights to B numbers [B]}.
Logged as spectra/NAME/LAYER every `diagnostics.spectra_freq` steps, and in the first and the last. To add a metric, add a line here."""
WEIGHT, GAMMA, WORST = "norm/weight", "pc/gamma/", "estimates/worst"


class Diagnostics:
    """Collects the metrics over all ranks.

    Args:
        config: of the run; `pc.blocks` also defines the PC matrices of a baseline.
        model_parts: this rank's transformers, sharded, compiled, off the meta device.
        preconditioner: None without PC.
    """

    def __init__(
        self,
        config: Config,
        model_parts: list[nn.Module],
        preconditioner: Preconditioner | None,
        parallel_dims: ParallelDims,
    ) -> None:
        self._settings, self._last = config.diagnostics, config.training.steps
        self._pc_entries: Sequence[str] = config.pc.blocks
        self._model_parts = model_parts
        self._preconditioner = preconditioner
        self._stage_ranks: int = parallel_dims.world_size // parallel_dims.pp
        self._squared_norm = SquaredNorm(model_parts, self._stage_ranks)
        self._gammas = {n: w.gamma for n, w in self._pc_weights().items() if w.gamma is not None}
        self._outputs = OutputSizes(model_parts) if self._settings.freq else None
        self._measuring = False
        self._reach = min(level.reach for level in config.pc.pc_config.levels.values())
        self._warned = False
        watched = config.pc.blocks if self._settings.spectra_freq else ()
        self._update = UpdateSizes(model_parts, watched, self._stage_ranks)
        self._numbers = self._list_numbers()
        self.factors = [factor for factors, _ in self._numbers for factor in factors] + self._update.factors
        """name and factor of each number of `measure`, for `RankNumbers`"""

    def _list_numbers(self) -> list[tuple[list[tuple[str, float]], Callable[[], Tensor]]]:
        """For each measurement, its numbers' names and factors, and what computes them on this rank. To log another, add it
        here, and its metric in `_metrics_of_numbers`."""
        numbers: list[tuple[list[tuple[str, float]], Callable[[], Tensor]]] = [([(WEIGHT, 1.0)], self._squared_weights)]
        if self._preconditioner is not None:
            numbers.append(([(WORST, 1.0)], self._preconditioner.take_worst))
        for name, gamma in self._gammas.items():  # the numbers of one name add up, over all ranks, to the mean gamma
            share = share_of(gamma, self._stage_ranks) / gamma.numel()
            numbers.append(([(GAMMA + name, share)] * local(gamma).numel(), partial(local, gamma)))
        if self._outputs is not None and self._outputs.outputs:
            factors = [(f"{size}/{part}/{layer}", 1.0) for layer, part in self._outputs.outputs for size in SIZES]
            numbers.append((factors, self._outputs.stop))
        return numbers

    def _squared_weights(self) -> Tensor:
        return self._squared_norm.of_parameters({f"{name}.weight" for name in self._pc_weights()}).float()

    def begin_step(self, step: int, measure_outputs: bool = True) -> None:
        """Call in every step before the first forward pass. `measure_outputs=False` skips the output sizes."""
        self._measuring = measure_outputs and self._is_due(step, self._settings.freq)
        if self._measuring and self._outputs is not None:
            self._outputs.start()

    @torch.no_grad()
    def begin_update(self, step: int) -> None:
        """Call in every step after the last backward pass, before the update: while parameters hold the effective weights."""
        if self._is_due(step, self._settings.spectra_freq):
            self._update.start()

    def _is_due(self, step: int, freq: int) -> bool:
        return is_due(step, freq, self._last)

    def is_due(self, step: int) -> bool:
        """Whether `collect` has metrics at `step`."""
        return self._is_due(step, self._settings.freq) or self._is_due(step, self._settings.spectra_freq)

    @torch.no_grad()
    def measure(self, step: int) -> list[Tensor]:
        """This rank's numbers after the optimizer step, in the order of `factors`; zeros if they are not due at `step`.

        Weights are those after the step, outputs those during the step, gradients as clipping left them.
        """
        update = len(self._update.factors)
        zeros = local(next(self._model_parts[0].parameters())).new_zeros
        numbers = [zeros(len(self.factors) - update)]
        if self._is_due(step, self._settings.freq):
            numbers = [compute().flatten() for _, compute in self._numbers]
        return [*numbers, *(self._update.stop() or [zeros(update)])]

    @torch.no_grad()
    def collect(self, step: int, of_ranks: OfRanks) -> dict[str, float]:
        """The metrics due at `step`, the same on all ranks; {} if none. All ranks call it after the optimizer step.

        Args:
            of_ranks: `measure` of all ranks.
        """
        metrics: dict[str, float] = {}
        if self._is_due(step, self._settings.freq):
            metrics |= self._metrics_of_numbers(of_ranks)
        if self._is_due(step, self._settings.spectra_freq):
            metrics |= self._spectra_metrics() | self._estimate_metrics()
            sums = of_ranks.sums()
            if norm := math.sqrt(sums.get(NORM, 0.0)):
                metrics |= {NORM: norm, "norm/relative_step": math.sqrt(sums[CHANGE]) / norm}
        return metrics

    def _metrics_of_numbers(self, of_ranks: OfRanks) -> dict[str, float]:
        """Output sizes, gamma of every weight, and the norm of all trained parameters (W where PC applies)."""
        sums, largest = of_ranks.sums(), of_ranks.largest()
        metrics = {WEIGHT: math.sqrt(sums[WEIGHT])} | {n: gamma for n, gamma in sums.items() if n.startswith(GAMMA)}
        if WORST in largest:
            metrics[WORST] = largest[WORST]
            self._warn(metrics[WORST])
        for name in sums if self._measuring else ():
            size, _, output = name.partition("/")
            if size == "squares":
                part, layer = output.split("/")
                metrics[f"signal/{part}/rms/{layer}"] = math.sqrt(sums[name] / sums[f"count/{output}"])
                metrics[f"signal/{part}/absmax/{layer}"] = largest[f"largest/{output}"]
        return metrics

    def _warn(self, worst: float) -> None:
        if worst > self._reach and not self._warned:
            self._warned = True
            logger.warning(
                f"PC: a largest singular value was {worst:.2f} times its estimate, more than its map allows, and was found anew "
                "(estimates/worst); this often means that optimizer.lr is high"
            )

    def _spectra_metrics(self) -> dict[str, float]:
        """`SPECTRAL` of effective weights, and geometric means of condition numbers.

        Owner ranks compute exact singular values of full matrices.
        """
        names: list[str] = []
        inputs: list[tuple[Tensor, ...]] = []
        for model in self._model_parts:
            for name, linear in model.named_modules():
                name = clean_name(name)
                if not isinstance(linear, nn.Linear) or block_of(name) is None:
                    continue
                names.append(name)
                weight = self._pc_weights().get(name)
                inputs.append((linear.weight if weight is None else weight.effective,))
        metrics: dict[str, float] = {}
        conditions: dict[str, list[float]] = {"pc": [], "qkv": [], "all": []}
        for name, numbers in self._compute_on_owners(
            _spectral, names, inputs, [None] * len(names), len(SPECTRAL)
        ).items():
            measured = dict(zip(SPECTRAL, numbers, strict=True))
            metrics |= {f"spectra/{metric}/{name}": number for metric, number in measured.items()}
            conditions["all"].append(measured["condition"])
            if block_of(name) in ("q", "k", "v"):
                conditions["qkv"].append(measured["condition"])
            if names_layer(self._pc_entries, name):
                conditions["pc"].append(measured["condition"])
        for group, values in conditions.items():
            if values:
                metrics[f"spectra/gmcn/{group}"] = statistics.geometric_mean(values)
        return metrics

    def _estimate_metrics(self) -> dict[str, float]:
        """Relative error of s as an estimate of W's spectral norm, per block with PC."""
        used = self._pc_weights()
        gammas = [gamma_values(weight.split, weight.effective, weight.gamma) for weight in used.values()]
        inputs: list[tuple[Tensor, ...]] = [
            (weight.orig, gamma, weight.u, weight.v) for weight, gamma in zip(used.values(), gammas, strict=True)
        ]
        splits = [weight.split for weight in used.values()]
        errors: dict[str | None, list[float]] = {}
        for name, (error,) in self._compute_on_owners(_largest_estimate_error, list(used), inputs, splits, 1).items():
            if not math.isnan(error):
                errors.setdefault(block_of(name), []).append(error)
        metrics = {}
        for block, values in errors.items():
            metrics[f"spectra/estimate_error/{block}/median"] = statistics.median(values)
            metrics[f"spectra/estimate_error/{block}/max"] = max(values)
        return metrics

    def _compute_on_owners(
        self, function: Callable, names: list[str], inputs: list[tuple[Tensor, ...]], settings: list, count: int
    ) -> dict[str, list[float]]:
        """`function` of each matrix of all pipeline stages, {name: numbers}; it returns [B, count] on the owners."""
        outputs = [(torch.zeros(count, device=item[0].device, dtype=item[0].dtype),) for item in inputs]
        Plan(inputs, outputs, settings).run(function, inputs, outputs)
        # one synchronisation of the device
        numbers = torch.stack([output for (output,) in outputs]).tolist() if outputs else []
        of_ranks: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, dict(zip(names, numbers, strict=True)))
        return {name: values for of_rank in of_ranks for name, values in of_rank.items()}

    def _pc_weights(self) -> dict[str, Weight]:
        return {} if self._preconditioner is None else self._preconditioner.weights


def _spectral(_, weight: Tensor) -> tuple[Tensor]:
    """`SPECTRAL` of effective weights [B, n, m], [B, metrics]."""
    values = singular_values(weight)
    return (torch.stack([metric(values) for metric in SPECTRAL.values()], -1).to(weight.dtype),)


def _largest_estimate_error(split: WeightSplit, weight: Tensor, *vectors: Tensor) -> tuple[Tensor]:
    """The largest error among a weight's matrices, [B, 1]. `vectors`: gamma, u and v."""
    _, u, v = split.split_vectors(*vectors)
    errors = [_estimate_error(*matrix) for matrix in zip(split.split_weight(weight), u, v, strict=True)]
    return (split.join(errors, split.gamma_shape).amax(-1, keepdim=True),)


def _estimate_error(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Relative error of s = u^T W v, [B, 1], for W [B, n, m]."""
    norm = singular_values(weight)[..., -1]
    error = (spectral_norm_estimate(weight, u, v).double() - norm).abs() / norm
    return error.unsqueeze(-1).to(weight.dtype)
