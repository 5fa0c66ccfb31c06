"""Health metrics during training: output sizes, gamma, norms, condition numbers, error of the norm estimate.

health = HealthMetrics(job_config, model_parts, step_schedule, parallel_dims)   # before the first forward
for step in ...:
    health.start_step(step)
    ...                                  # forward and backward passes, optimizer, materialise
    metrics_processor.log_health(step, health.collect(step))   # on every rank, because it uses collectives
"""

import math
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pc.common.spectra import modified_condition_number, singular_values
from pc.config import BLOCK_SUFFIXES, PCConfig, block_of, matches
from pc.cuts import Form
from pc.linear import evaluate
from pc.owner import local, run_on_owners, sharding_dimensions
from pc.schedules import Schedule, State
from pc.spectral import spectral_norm_estimate
from pc.titan.activations import COUNT, LARGEST, PARTS, SUM_OF_SQUARES, OutputSizes
from pc.weights import clean_name

BLOCKS = tuple(BLOCK_SUFFIXES)

SPECTRAL: dict[str, Callable[[Tensor], Tensor]] = {"condition": modified_condition_number}
"""{NAME: function from the ascending singular values [B, min(n, m)] of B effective weights to B numbers [B]}.
Logged as spectra/NAME/LAYER every `health.spectra_freq` steps. To add a metric, add a line here."""


class HealthMetrics:
    """Collects the metrics over all ranks.

    Args:
        job_config: with the section `health` (`pc.settings.schema.Health`) and with `pc.blocks`, which also defines the PC matrices of a
            baseline run.
        model_parts: this rank's transformers, sharded, compiled, off the meta device.
        schedule: None without PC.
        parallel_dims: TorchTitan's ParallelDims.
    """

    def __init__(self, job_config, model_parts: list[nn.Module], schedule: Schedule | None, parallel_dims) -> None:
        self._health = job_config.health
        self._pc_entries: Sequence[str] = job_config.pc.blocks
        self._model_parts = model_parts
        self._schedule = schedule
        self._num_layers: int = model_parts[0].n_layers
        self._num_stage_ranks: int = parallel_dims.world_size // parallel_dims.pp
        self._device = next(model_parts[0].parameters()).device
        self._outputs = OutputSizes(model_parts) if self._health.freq else None
        self._measuring = False

    def start_step(self, step: int, measure_outputs: bool = True) -> None:
        """Call in every step before the first forward pass. `measure_outputs=False` skips the output sizes."""
        self._measuring = self._outputs is not None and measure_outputs and _is_due(step, self._health.freq)
        if self._measuring:
            self._outputs.start()

    @torch.no_grad()
    def collect(self, step: int) -> dict[str, float]:
        """The metrics due at `step`, the same on all ranks; {} if none. All ranks call it after the optimizer step.

        Weights are those after the step, outputs those during the step.
        """
        metrics: dict[str, float] = {}
        if self._measuring:
            metrics |= self._output_metrics(self._outputs.stop())
        if _is_due(step, self._health.freq):
            metrics |= self._weight_metrics()
        if _is_due(step, self._health.spectra_freq):
            metrics |= self._spectra_metrics()
        if _is_due(step, self._health.estimate_freq):
            metrics |= self._estimate_metrics()
        return metrics

    def _output_metrics(self, measured: dict[tuple[int, str], Tensor]) -> dict[str, float]:
        parts = list(PARTS.values())
        sums = self._zeros(self._num_layers, len(parts), 2)
        largest = self._zeros(self._num_layers, len(parts))
        for (layer, part), sizes in measured.items():
            sums[layer, parts.index(part)] = sizes[[SUM_OF_SQUARES, COUNT]].double()
            largest[layer, parts.index(part)] = sizes[LARGEST]
        # one device synchronisation each
        all_sums, all_largest = _reduce(sums).tolist(), _reduce(largest, dist.ReduceOp.MAX).tolist()
        metrics = {}
        for layer in range(self._num_layers):
            for i, part in enumerate(parts):
                total, count = all_sums[layer][i]
                metrics[f"signal/{part}/rms/{layer}"] = math.sqrt(total / count) if count else math.nan
                metrics[f"signal/{part}/absmax/{layer}"] = all_largest[layer][i]
        return metrics

    def _weight_metrics(self) -> dict[str, float]:
        """gamma of every matrix, and the norm of all trained parameters (W where PC applies)."""
        gammas = self._zeros(self._num_layers, len(BLOCKS), 2)  # sum of values, number of ranks
        for name, state in self._pc_weights().items():
            if state.gamma is not None and local(state.gamma).numel():
                gamma = local(state.gamma).double()
                # no device synchronisation
                gammas[self._cell(name)] = torch.stack([gamma.sum(), torch.ones_like(gamma).sum()])
        raws = {f"{name}.weight": state.raw for name, state in self._pc_weights().items()}
        squares = self._zeros(1)
        for model in self._model_parts:
            for name, parameter in model.named_parameters():
                tensor = raws.get(clean_name(name), parameter)
                shards = math.prod(tensor.device_mesh.size(d) for d in sharding_dimensions(tensor))
                norm = torch.linalg.vector_norm(local(tensor), dtype=torch.float64)  # float32 is 1e-4 off on a CPU
                squares += norm.square() * shards / self._num_stage_ranks
        gammas, squares = _reduce(gammas), _reduce(squares)
        metrics = {"norm/weight": math.sqrt(squares.item())}
        for name, (value, copies) in self._cells(gammas):
            if copies:
                metrics[f"pc/gamma/{name}"] = value / copies
        return metrics

    def _spectra_metrics(self) -> dict[str, float]:
        """`SPECTRAL` of effective weights, and geometric means of condition numbers, on all ranks.

        Owner ranks compute exact singular values of full matrices.
        """
        names, inputs, keys = [], [], []
        for model in self._model_parts:
            for name, linear in model.named_modules():
                name = clean_name(name)
                if not isinstance(linear, nn.Linear) or block_of(name) is None:
                    continue
                names.append(name)
                state = self._pc_weights().get(name)
                if state is None or state.mark.config.schedule == "step":
                    inputs.append((linear.weight if state is None else state.weight,))
                    keys.append(None)
                else:
                    inputs.append((state.raw, *state.gammas, state.u, state.v))
                    keys.append(state.form)
        metrics = {}
        conditions: dict[str, list[float]] = {"pc": [], "qkv": [], "all": []}
        for name, numbers in self._of_owners(_spectral, names, inputs, keys, len(SPECTRAL)):
            measured = dict(zip(SPECTRAL, numbers, strict=True))
            metrics |= {f"spectra/{metric}/{name}": number for metric, number in measured.items()}
            conditions["all"].append(measured["condition"])
            if block_of(name) in ("q", "k", "v"):
                conditions["qkv"].append(measured["condition"])
            if any(matches(entry, name) for entry in self._pc_entries):
                conditions["pc"].append(measured["condition"])
        for group, values in conditions.items():
            if values:
                metrics[f"spectra/gmcn/{group}"] = statistics.geometric_mean(values)
        return metrics

    def _estimate_metrics(self) -> dict[str, float]:
        """Relative error of s as an estimate of W's spectral norm, per block with PC; {} without PC."""
        states = self._pc_weights()
        inputs = [(state.raw, state.u, state.v) for state in states.values()]
        forms = [state.form for state in states.values()]
        errors: dict[str, list[float]] = {}
        for name, (error,) in self._of_owners(_largest_estimate_error, list(states), inputs, forms, 1):
            if not math.isnan(error):
                errors.setdefault(block_of(name), []).append(error)
        metrics = {}
        for block, values in errors.items():
            metrics[f"spectra/estimate_error/{block}/median"] = statistics.median(values)
            metrics[f"spectra/estimate_error/{block}/max"] = max(values)
        return metrics

    def _of_owners(self, function, names: list[str], inputs: list[tuple[Tensor, ...]], keys: list, count: int):
        """(name, [numbers]) of each matrix of all pipeline stages; `function` returns [B, count] on the owners."""
        outputs = [torch.zeros(count, device=self._device, dtype=item[0].dtype) for item in inputs]
        run_on_owners(function, inputs, [(output,) for output in outputs], keys)
        found = self._zeros(self._num_layers, len(BLOCKS), count + 1)  # sums of numbers, number of ranks
        for name, output in zip(names, outputs, strict=True):
            found[self._cell(name)] = torch.cat([output.double(), output.new_ones(1).double()])
        for name, (*numbers, copies) in self._cells(_reduce(found)):
            yield name, [number / copies for number in numbers]

    def _pc_weights(self) -> dict[str, State]:
        return {} if self._schedule is None else self._schedule.weights

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def _cell(self, name: str) -> tuple[int, int]:
        """Index of the linear layer `name` in a table [layers, blocks] of all pipeline stages."""
        return int(name.split(".")[1]), BLOCKS.index(block_of(name))

    def _cells(self, table: Tensor):
        """Names and values of the filled cells; a cell's last value is the number of ranks that filled it."""
        for layer, row in enumerate(table.tolist()):
            for block, values in zip(BLOCKS, row, strict=True):
                if values[-1]:
                    yield f"layers.{layer}.{BLOCK_SUFFIXES[block][0]}", values


def _is_due(step: int, freq: int) -> bool:
    return freq > 0 and (step == 1 or step % freq == 0)


def _reduce(tensor: Tensor, operation=dist.ReduceOp.SUM) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(tensor, operation)
    return tensor


def _spectral(key: Form | None, weight: Tensor, *rest: Tensor) -> tuple[Tensor]:
    """`SPECTRAL` of the effective weight, [B, metrics].

    Args:
        key: None if `weight` [B, n, m] is effective; a Form if the tensors are W, perhaps gamma, u and v.
    """
    if key is not None:
        (weight,) = evaluate(key, weight, *rest)
    values = singular_values(weight)
    return (torch.stack([metric(values) for metric in SPECTRAL.values()], -1).to(weight.dtype),)


def _largest_estimate_error(form: Form, *tensors: Tensor) -> tuple[Tensor]:
    """The largest of a weight's matrices, [B, 1]."""
    return (form.apply(_estimate_error, "wuv", tensors, "g")[0].amax(-1, keepdim=True),)


def _estimate_error(_: PCConfig, weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor]:
    """Relative error of s = u^T W v, [B, 1], for W [B, n, m]."""
    norm = singular_values(weight)[..., -1]
    error = (spectral_norm_estimate(weight, u, v).double() - norm).abs() / norm
    return (error.unsqueeze(-1).to(weight.dtype),)
