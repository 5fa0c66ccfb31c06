"""When FSDP all-gathers weights and reduce-scatters gradients: for every micro-batch, or once per optimizer step.

Weights change once per step and gradients accumulate over it, so one all-gather and one reduce-scatter are enough.
Between them a rank holds the unsharded weights and float32 gradients of its model part. `parallelism.fsdp_sync`:

"micro_batch"   both for every micro-batch, as TorchTitan does
"step"          both once per step
"auto"          "step" if the memory estimate fits the device, else "micro_batch"

Replicas (HSDP) reduce once per step in both, which needs no extra memory. With one process there is no communication,
and "step" saves copies.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools.logging import logger

from pc.settings import Config
from pc.settings.layout import Degrees
from pc.titan import memory


def once_per_step(config: Config, dims: Degrees, device: torch.device, device_bytes: int) -> bool:
    """Whether both happen once per step. All ranks call it and get the same answer.

    Args:
        device: of this rank.
        device_bytes: its memory; the smallest of all ranks counts.
    """
    if not memory.gathers_once(config):
        return False
    least = torch.tensor(device_bytes, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    needed, available = sum(memory.of_run(config, dims).values()), least.item() / memory.GIB
    if needed + memory.RESERVE_GIB <= available:
        return True
    sums = f"an estimated {needed:.1f} GiB plus {memory.RESERVE_GIB} GiB in reserve, of {available:.1f} GiB"
    if config.parallelism.fsdp_sync == "step":
        logger.warning(f'parallelism.fsdp_sync = "step" may not fit: {sums}')
        return True
    logger.warning(
        f"Weights are gathered and gradients reduced for every micro-batch: once per step needs {sums}; "
        'parallelism.fsdp_sync = "step" does it anyway'
    )
    return False


def start_micro_batch(model_parts: Iterable[nn.Module], once_per_step: bool, is_last: bool) -> None:
    """Set what the next backward pass does. Call it before each micro-batch, but not in a pipeline, which does so itself.

    Args:
        is_last: whether it is the step's last micro-batch, after which gradients are complete and weights sharded.
    """
    for model in model_parts:
        model.set_requires_all_reduce(is_last)  # among replicas
        if once_per_step:
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)


def reshard(model_parts: Iterable[nn.Module]) -> None:
    """Free the gathered weights that a forward pass without gradients leaves behind."""
    for model in model_parts:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
