"""When FSDP all-gathers weights and reduce-scatters gradients: for every micro-batch, or once per optimizer step.

Weights change once per step and gradients accumulate over it, so one all-gather and one reduce-scatter are enough.
Between them a rank holds the unsharded weights and float32 gradients of its model part. `parallelism.fsdp_sync`:

"micro_batch"         both for every micro-batch, as TorchTitan does
"replicas_per_step"   the same, but the all-reduce among replicas (HSDP) once per step; needs no extra memory
"step"                both once per step
"auto"                "step" if the memory estimate fits the device, else "replicas_per_step"

With one process there is no communication, and "step" saves copies.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from pc.settings import Config
from pc.titan import memory


def choose(config: Config, dims: ParallelDims, device: torch.device, device_bytes: int) -> str:
    """Resolve "auto"; returns other settings unchanged. All ranks call it and get the same result.

    Args:
        device: of this rank.
        device_bytes: its memory; the smallest of all ranks counts.
    """
    asked = config.parallelism.fsdp_sync
    if dims.pp_enabled:
        logger.info(
            "parallelism.fsdp_sync has no effect with pipeline parallelism: torch's schedules gather weights and "
            "reduce gradients once for every pass of a batch through the pipeline"
        )
        return "micro_batch"
    parts = memory.of_run(config, dims)
    least = torch.tensor(device_bytes, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    needed, available = sum(parts.values()), least.item() / memory.GIB
    fits = needed + memory.RESERVE_GIB <= available
    sums = f"an estimated {needed:.1f} GiB plus {memory.RESERVE_GIB} GiB in reserve, of {available:.1f} GiB"
    if asked != "auto":
        if asked == "step" and not fits:
            logger.warning(f'parallelism.fsdp_sync = "step" may not fit: {sums}')
        return asked
    if memory.gathers_once(config) and fits:
        return "step"
    if memory.gathers_once(config):
        logger.warning(
            f"Weights are gathered and gradients reduced for every micro-batch: once per step needs {sums}; "
            'parallelism.fsdp_sync = "step" does it anyway'
        )
    return "replicas_per_step"


def start_micro_batch(model_parts: Iterable[nn.Module], sync: str, is_last: bool) -> None:
    """Set what the next backward pass does. Call it before each micro-batch.

    Args:
        sync: the result of `choose`.
        is_last: whether it is the step's last micro-batch, after which gradients are complete and weights sharded.
    """
    if sync == "micro_batch":
        return
    for model in model_parts:
        if sync == "replicas_per_step":
            model.set_requires_all_reduce(is_last)
        else:
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)


def reshard(model_parts: Iterable[nn.Module]) -> None:
    """Free the gathered weights that a forward pass without gradients leaves behind."""
    for model in model_parts:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
