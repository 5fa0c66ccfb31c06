"""What a run needs of GPU memory and disk space, in words, against what there is."""

import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pc.config import PCConfig
from pc.errors import UserError
from pc.method import method_of
from pc_recipe.config import Config
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.config.schema import Checkpoint
from pc_recipe.files import look
from pc_recipe.plan import memory
from pc_recipe.plan.micro_batch import Gpu, estimate_all


@dataclass(frozen=True)
class OnDisk:
    """What a run or its preparation will write."""

    folder: Path
    size: int
    """bytes"""
    what: str
    details: str

    def __str__(self) -> str:
        return f"{self.what} {_gib(self.size)}"


def describe_memory(config: Config, batches: RankBatches, sizes: memory.Sizes, gpu: Gpu) -> tuple[dict[str, str], str]:
    """Whether the run fits a GPU, the micro-batches that would, and the memory by part; and a warning, or ""."""
    parts = memory.estimate_memory(config, batches.dims, sizes)
    needed, chosen = sum(parts.values()), config.training.local_batch_size
    verdict = "yes" if needed <= gpu.usable_gib else "perhaps" if needed <= gpu.gib else "no"
    facts = {
        "fits": f"{verdict}: {needed:.1f} GiB per GPU, {gpu.usable_gib:.1f} usable on "
        f"{batches.dims.world_size} x {gpu.gib:.3g} GiB ({gpu.where})",
        "micro-batch": _describe_micro_batches(config, batches, sizes, gpu),
        "memory per GPU": f"{needed:.1f} GiB estimated: {', '.join(f'{part} {gib:.2f}' for part, gib in parts.items())}",
    }
    if verdict == "yes":
        return facts, ""
    return facts, (
        f"training.local_batch_size = {chosen} needs {needed:.1f} GiB by the estimate, but only {gpu.usable_gib:.1f} of a "
        f"GPU's {gpu.gib:.3g} GiB ({gpu.where}) are usable; -1 takes the largest that fits"
    )


def _describe_micro_batches(config: Config, batches: RankBatches, sizes: memory.Sizes, gpu: Gpu) -> str:
    """The micro-batch, the largest that fits, and the memory of sizes near that."""
    chosen = config.training.local_batch_size
    try:
        estimates = estimate_all(config, batches, sizes)
    except UserError:  # nothing to divide
        return f"{chosen} sequences"
    given, fitting = list(estimates), sum(gib <= gpu.usable_gib for gib in estimates.values())
    largest = f"the largest that fits is {given[fitting - 1]}" if fitting else "none fits"
    near = ", ".join(f"{size}: {estimates[size]:.1f} GiB" for size in given[max(0, fitting - 2) : fitting + 1])
    return f"{chosen} sequences; {largest} ({near})"


def describe_disk(writes: Iterable[OnDisk]) -> tuple[str, list[str]]:
    """What is written and what is free where it is written; and a warning for each file system that is too small."""
    lines, warnings = [], []
    by_device: dict[int, list[OnDisk]] = {}
    for one in writes:
        by_device.setdefault(_existing(one.folder).stat().st_dev, []).append(one)
    for some in by_device.values():
        place = _existing(some[0].folder)
        free, needed = shutil.disk_usage(place).free, sum(one.size for one in some)
        lines.append(
            f"{_gib(needed)} needed, {_gib(free)} free in {place}: {', '.join(f'{one} ({one.details})' for one in some)}"
        )
        if free < needed:
            warnings.append(f"{place} has {_gib(free)} free, too little for {', '.join(map(str, some))}")
    return "; ".join(lines), warnings


def _existing(folder: Path) -> Path:
    return next(parent for parent in [folder, *folder.absolute().parents] if look.is_there(parent))


def describe_pc(config: PCConfig) -> str:
    """What PC(W) is, in a few words; by the entries of `blocks` where they differ."""
    of_blocks = {block: method_of(config.for_block(block)).describe() for block in config.blocks}
    if len(set(of_blocks.values())) == 1:
        return of_blocks[config.blocks[0]]
    return "; ".join(f"{block}: {description}" for block, description in of_blocks.items())


def _gib(size: float) -> str:
    return f"{size / memory.GIB:.1f} GiB"


def data_on_disk(folder: str, tokens: float, bytes_per_token: int) -> OnDisk:
    """Token shards that are still to be made, each token of the run once."""
    details = f"{folder}, {tokens:,.0f} tokens of {bytes_per_token} bytes"
    return OnDisk(Path(folder), round(tokens * bytes_per_token), "data", details)


def checkpoints_on_disk(config: Config, sizes: memory.Sizes) -> OnDisk:
    """The checkpoints of a whole run at its end."""
    folder, size = config.folder, memory.estimate_checkpoint_bytes(config, sizes)
    kept = _count_kept_checkpoints(config.checkpoint, config.training.steps)
    return OnDisk(folder, size * kept, "checkpoints", f"{folder}, {kept} x {size / memory.GIB:.2f}")


def _count_kept_checkpoints(section: Checkpoint, steps: int) -> int:
    """Checkpoints of a whole run at its end, plus one that is being written and one damaged one that was set aside."""
    milestones = steps // section.keep_every if section.keep_every else 0
    if section.keep_latest_k:
        return milestones + section.keep_latest_k + 2
    both = steps // math.lcm(section.interval, section.keep_every) if section.keep_every else 0
    return milestones + steps // section.interval - both + 2
