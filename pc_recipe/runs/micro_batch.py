"""The micro-batch that `training.local_batch_size = -1` stands for, chosen once before a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.runs import memory

ASSUMED_GIB = 79.0
"""What torch shows of a GPU that is sold with 80 GB."""
USABLE = 0.85
"""The share of a GPU's memory that the estimate may fill. The paper measured 6 % more than the estimate
(`tests/unit/runs/test_check.py`); 1 to 4 GiB of CUDA and NCCL are 5 % of 80 GB."""


@dataclass(frozen=True)
class Choice:
    """A config with its micro-batch, and what it was chosen from."""

    config: Config
    """The given config if its micro-batch is a number."""
    estimates: dict[int, float]
    """{micro-batch: GiB per GPU} of all that divide the global batch; empty if nothing had to be chosen."""
    gpu_gib: float
    has_gpu: bool
    """Whether `gpu_gib` was measured on a GPU of this machine."""

    def text(self) -> str:
        """The choice with the memory of its neighbours."""
        chosen, sizes = self.config.training.local_batch_size, list(self.estimates)
        place = sizes.index(chosen)
        near = ", ".join(f"{size}: {self.estimates[size]:.1f} GiB" for size in sizes[max(0, place - 1) : place + 2])
        gpu = f"{self.gpu_gib:.3g} GiB ({'found here' if self.has_gpu else 'assumed'})"
        return f"{chosen} of {near}; a GPU of {gpu}, of which {USABLE * self.gpu_gib:.1f} are used"


def choose(config: Config, world_size: int, gpu_gib: float | None = None) -> Choice:
    """Replace -1 in both `local_batch_size`: by the most sequences that divide the global batch and fit, in
    training; by the same number in validation.

    Args:
        gpu_gib: memory of a GPU; None: of the smallest one here, or `ASSUMED_GIB`.

    Raises:
        UserError: there is nothing to divide, or nothing fits.
    """
    has_gpu = gpu_gib is None and torch.cuda.is_available()
    gpu_gib = gpu_gib or (_smallest_gpu() if has_gpu else ASSUMED_GIB)
    config, estimates = config.model_copy(deep=True), {}
    if config.training.local_batch_size == -1:
        estimates = _estimates(config, RankBatches.of(config, world_size))
        fitting = [size for size, estimate in estimates.items() if estimate <= USABLE * gpu_gib]
        if not fitting:
            raise UserError(
                f"training.local_batch_size = -1: one sequence needs {estimates[1]:.1f} GiB by the estimate, and "
                f"{USABLE * gpu_gib:.1f} of a GPU's {gpu_gib:.3g} GiB are used; more GPUs, activation_checkpoint.mode = "
                '"full" or parallelism.fsdp_sync = "micro_batch" take less, 1 tries it anyway'
            )
        config.training.local_batch_size = fitting[-1]
    if config.validation.local_batch_size == -1:
        config.validation.local_batch_size = config.training.local_batch_size
    return Choice(config, estimates, gpu_gib, has_gpu)


def _smallest_gpu() -> float:
    here: Sequence[int] = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(gpu).total_memory for gpu in here) / memory.GIB


def _estimates(config: Config, batches: RankBatches) -> dict[int, float]:
    """GiB per GPU for every micro-batch that divides, from the smallest to the largest."""
    sizes = memory.count_sizes_of_config(config)
    estimates = {}
    for size in batches.micro_batch_sizes():
        config.training.local_batch_size = size
        estimates[size] = sum(memory.estimate_memory(config, batches.dims, sizes).values())
    return estimates
