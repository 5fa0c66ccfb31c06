"""When FSDP gathers weights and reduces gradients: with every micro-batch, or once per optimizer step.

Weights change once per step and gradients add up over it, so one gather and one reduction are enough. Between them a
rank holds all of its model part's compute weights and float32 gradients whole. `parallelism.fsdp_sync` chooses:

"micro_batch"         both with every micro-batch, TorchTitan's way
"replicas_per_step"   the same, but the all-reduce among replicas (HSDP) once per step; takes no memory
"step"                both once per step
"auto"                "step" where the memory estimate fits the device, else "replicas_per_step"

With one process there is nothing to exchange, and "step" saves the copies that stand for it.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from pc.titan import memory
from pc.titan.config import JobConfig


def choose(config: JobConfig, dims: ParallelDims, device: torch.device, device_bytes: int) -> str:
    """The way for "auto", the same on all ranks, which call it together; other ways are as the config has them.

    Args:
        device: of this rank.
        device_bytes: its memory; the least of all ranks counts.
    """
    asked = config.parallelism.fsdp_sync
    if dims.pp_enabled:
        logger.info(
            "parallelism.fsdp_sync has no say under pipeline parallelism: torch's schedules gather weights and reduce "
            "gradients once for every pass of a batch through the pipeline"
        )
        return "micro_batch"
    parts = memory.of_run(config, dims)
    least = torch.tensor(device_bytes, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    needed, there = sum(parts.values()), least.item() / memory.GIB
    fits = needed + memory.RESERVE_GIB <= there
    sums = f"estimated {needed:.1f} GiB and {memory.RESERVE_GIB} in reserve, of {there:.1f} GiB"
    if asked != "auto":
        if asked == "step" and not fits:
            logger.warning(f'parallelism.fsdp_sync = "step" may not fit: {sums}')
        return asked
    if memory.gathers_once(config) and fits:
        return "step"
    if memory.gathers_once(config):
        logger.warning(
            f"Weights are gathered and gradients reduced with every micro-batch: once per step needs {sums}; "
            'parallelism.fsdp_sync = "step" does it all the same'
        )
    return "replicas_per_step"


def start_micro_batch(model_parts: Iterable[nn.Module], sync: str, is_last: bool) -> None:
    """Call before each micro-batch of a step, for what its backward pass shall do.

    Args:
        sync: what `choose` returned.
        is_last: whether it is the step's last one, after which gradients are complete and weights sharded.
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
    """Give back gathered weights, which a forward pass without gradients leaves behind."""
    for model in model_parts:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
