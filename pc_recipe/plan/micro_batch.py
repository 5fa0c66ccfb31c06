"""The micro-batch that `training.local_batch_size = -1` stands for, chosen once before a run."""

from dataclasses import dataclass

import torch

from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.plan import memory
from pc_recipe.plan.allocation import ASSUMED_GIB

USABLE = 0.85
"""The share of a GPU's memory that the estimate may fill. The paper measured 6 % more than the estimate
(`tests/unit/plan/test_check.py`); 1 to 4 GiB of CUDA and NCCL are 5 % of 80 GB."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that a run may use."""

    gib: float
    where: str
    """Where `gib` comes from."""

    @property
    def usable_gib(self) -> float:
        return USABLE * self.gib


def choose(config: Config, world_size: int, gpu: Gpu | None = None, sizes: memory.Sizes | None = None) -> Config:
    """Replace `training.local_batch_size` -1 by the most sequences that divide the global batch and fit.

    Args:
        gpu: None: `find_gpu`.
        sizes: of the model, if known.

    Raises:
        UserError: as `RankBatches.micro_batch_sizes`, or nothing fits.
    """
    config = config.model_copy(deep=True)
    if config.training.local_batch_size == -1:
        gpu, sizes = gpu or find_gpu(), sizes or memory.count_sizes(config)
        estimates = estimate_all(config, RankBatches.of(config, world_size), sizes)
        fitting = [size for size, estimate in estimates.items() if estimate <= gpu.usable_gib]
        if not fitting:
            raise UserError(
                f"training.local_batch_size = -1: one sequence needs {estimates[1]:.1f} GiB by the estimate, but only "
                f"{gpu.usable_gib:.1f} of a GPU's {gpu.gib:.3g} GiB are usable; more GPUs, activation_checkpoint.mode = "
                '"full" or parallelism.fsdp_sync = "micro_batch" take less; 1 tries it anyway'
            )
        config.training.local_batch_size = fitting[-1]
    return config


def find_gpu(gib: float | None = None) -> Gpu:
    """A GPU of `gib` GiB; None: the smallest one here, or one of `ASSUMED_GIB`."""
    if gib == ASSUMED_GIB or (gib is None and not torch.cuda.is_available()):
        return Gpu(ASSUMED_GIB, "assumed, an 80 GB GPU")
    if gib is not None:
        return Gpu(gib, "given")
    here = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
    smallest = min(here, key=lambda gpu: gpu.total_memory)
    return Gpu(smallest.total_memory / memory.GIB, f"{smallest.name}, found here")


def estimate_all(config: Config, batches: RankBatches, sizes: memory.Sizes) -> dict[int, float]:
    """GiB per GPU for every micro-batch that divides, from the smallest to the largest.

    Raises:
        UserError: as `RankBatches.micro_batch_sizes`.
    """
    config, estimates = config.model_copy(deep=True), {}
    for size in batches.micro_batch_sizes():
        config.training.local_batch_size = size
        estimates[size] = sum(memory.estimate_memory(config, batches.dims, sizes).values())
    return estimates
