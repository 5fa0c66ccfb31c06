"""Finds errors in a config in seconds, without a GPU."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pc.errors import UserError
from pc.methods import method_of
from pc_recipe.config import Config, load_config, rules
from pc_recipe.config.layout import Layout
from pc_recipe.config.pc_section import PC
from pc_recipe.config.schema import Checkpoint
from pc_recipe.data import GlobalOrderLoader, Manifest, require_same_tokenizer
from pc_recipe.data.demo import FOLDER as DEMO
from pc_recipe.runs import memory, micro_batch


@dataclass
class Report:
    """Results of a dry run."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fail(self, error: str) -> None:
        """Add an error, unless another check has found the same."""
        if error not in self.errors:
            self.errors.append(error)

    def require(self, where: str = "") -> None:
        """For launchers: raise one `UserError` with all errors."""
        if self.errors:
            raise UserError(where + "\nerror: ".join(self.errors))

    def text(self) -> str:
        lines = [f"{name:<22} {value}" for name, value in self.facts]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"error: {error}" for error in self.errors]
        return "\n".join(lines)


def check(
    path: str | Path,
    overrides: Sequence[str],
    world_size: int,
    *,
    needs_data: bool = True,
    gpu_gib: float | None = None,
) -> Report:
    """Check a run on `world_size` GPUs.

    Args:
        gpu_gib: as in `pc_recipe.runs.micro_batch.choose`.
        needs_data: report missing data as an error; otherwise as a warning with the command that creates them.

    Raises:
        UserError: the config files cannot be read or merged, so nothing else can be checked.
    """
    return check_config(load_config(path, overrides), world_size, needs_data=needs_data, gpu_gib=gpu_gib)


def check_config(config: Config, world_size: int, *, needs_data: bool = True, gpu_gib: float | None = None) -> Report:
    """`check` of a config that has been read."""
    report = Report(errors=list(rules.findings(config)))
    is_valid = not report.errors
    choice = _tried(report, micro_batch.choose, config, world_size, gpu_gib) if is_valid else None
    if choice and choice.estimates:
        report.facts.append(("micro-batch", choice.text()))
    config = choice.config if choice else config
    layout = _tried(report, Layout.of, config, world_size) if choice or not is_valid else None
    tokens = 0
    if layout:
        tokens = config.training.steps * _check_batch(report, config, layout)
        # the trainer's rules, without those for CPUs, because the run may use another machine
        for finding in rules.findings(config, layout.dims):
            report.fail(finding)
    _check_schedule(report, config)
    if is_valid:
        sizes = _check_model(report, config)
        if layout:
            _tried(report, _check_memory, report, config, sizes, layout)
    _check_data(report, config, needs_data, tokens)
    return report


def _tried(report: Report, function, *arguments):
    """The function's result, or None after adding its `UserError` to the report."""
    try:
        return function(*arguments)
    except UserError as error:
        report.fail(str(error))
        return None


def _check_batch(report: Report, config: Config, layout: Layout) -> int:
    """Tokens per optimizer step, 0 if the batch does not divide."""
    training = config.training
    if _tried(report, lambda: layout.micro_batches) is None:
        return 0
    report.facts += [
        (
            "batch",
            f"{layout.sequences} sequences = {training.local_batch_size} per GPU x {layout.data_ranks} data-parallel "
            f"ranks x {layout.micro_batches} micro-batches, {layout.tokens:,} tokens",
        ),
        ("steps", f"{training.steps:,}, warmup {config.lr_scheduler.warmup_steps:,}"),
        ("tokens", f"{training.steps * layout.tokens:,}"),
    ]
    return layout.tokens


def _check_schedule(report: Report, config: Config) -> None:
    steps, warmup = config.training.steps, config.lr_scheduler.warmup_steps
    if warmup > steps:
        report.fail(f"lr_scheduler.warmup_steps = {warmup} should be at most training.steps = {steps}")
    if not config.checkpoint.enable:
        report.warnings.append("checkpoint.enable is false: an interrupted run starts again from step 0")
        return
    if config.checkpoint.last_save_model_only:
        report.warnings.append("checkpoint.last_save_model_only is true: the last checkpoint cannot be resumed")


def _check_model(report: Report, config: Config) -> memory.Sizes:
    sizes = memory.sizes_of_run(config)
    parameters = memory.sizes_of_run(config.model_copy(update={"pc": PC()})).total
    report.facts.append(
        ("parameters", f"{parameters:,}, {parameters - sizes.outside_blocks:,} without embedding and head")
    )
    loads = config.checkpoint.enable and config.checkpoint.initial_load_path
    if config.pc.enable and loads and config.pc.start == "preserve":
        pc_config = config.pc.pc_config
        for block in pc_config.blocks:
            _tried(report, method_of(pc_config.for_block(block)).require_invertible)
    if config.pc.enable:
        share = sizes.preconditioned / parameters
        report.facts.append(
            ("preconditioned", f"{sizes.preconditioned:,} weights ({share:.0%}), level {config.pc.level}")
        )
    return sizes


def _check_memory(report: Report, config: Config, sizes: memory.Sizes, layout: Layout) -> None:
    folder = Path(config.job.dump_folder)
    dims = layout.dims
    parts = memory.of_run(config, dims, sizes)
    listed = ", ".join(f"{part} {size:.2f}" for part, size in parts.items())
    report.facts.append(
        ("memory per GPU", f"{sum(parts.values()):.1f} GiB estimated at {dims.world_size} GPUs: {listed}")
    )
    if not config.checkpoint.enable:
        return
    size = memory.checkpoint_bytes(config, sizes)
    kept = _checkpoints_kept(config.checkpoint, config.training.steps)
    needed = size * kept
    report.facts.append(
        (
            "checkpoint disk",
            f"{needed / memory.GIB:.1f} GiB at the end: {kept} checkpoints of {size / memory.GIB:.2f} GiB in {folder}",
        )
    )
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        report.warnings.append(
            f"{existing} has {free / memory.GIB:.1f} GiB free, the checkpoints need {needed / memory.GIB:.1f} GiB"
        )


def _checkpoints_kept(section: Checkpoint, steps: int) -> int:
    """Checkpoints of a whole run that are on the disk at its end, one more being written and one damaged, set aside."""
    milestones = steps // section.keep_every if section.keep_every else 0
    if section.keep_latest_k:
        return milestones + section.keep_latest_k + 2
    both = steps // math.lcm(section.interval, section.keep_every) if section.keep_every else 0
    return milestones + steps // section.interval - both + 2


def _check_data(report: Report, config: Config, needs_data: bool, wanted: int) -> None:
    """Check the data for a run over `wanted` tokens."""
    section = config.data
    train = {folder: _manifest(report, "data.path", folder, needs_data) for folder in section.folders}
    validation = train
    if section.validation_path:
        key = "data.validation_path"
        validation = {section.validation_path: _manifest(report, key, section.validation_path, needs_data)}
    found = [manifest for manifest in (train | validation).values() if manifest]
    for other in found[1:]:
        _tried(report, require_same_tokenizer, found[0], other)
    for folder, manifest in train.items():
        if manifest:
            _check_training(report, config, manifest, section.folders[folder] / sum(section.folders.values()), wanted)
    for manifest in validation.values() if config.validation.enable else ():
        if manifest:
            _check_validation(report, config, manifest)


def _check_training(report: Report, config: Config, manifest: Manifest, share: float, wanted: int) -> None:
    tokens = manifest.tokens("train")
    whole = "" if share == 1 else f"{share:.1%} of the sequences, "
    fact = f"{manifest.folder}: {whole}{tokens:,} tokens, tokenizer {manifest.tokenizer.name}"
    report.facts.append(("training data", fact))
    if _sequences(report, config, manifest, "train") > 0 and tokens < wanted * share:
        which = "its" if share == 1 else f"{manifest.folder}:"
        report.warnings.append(
            f"the run repeats {which} {tokens:,} training tokens {wanted * share / tokens:.1f} times"
        )


def _check_validation(report: Report, config: Config, manifest: Manifest) -> None:
    sequences, requested = _sequences(report, config, manifest, "validation"), config.data.validation_sequences
    report.facts.append(("validation data", f"{min(sequences, requested)} sequences of {config.training.seq_len}"))
    if sequences < requested:
        report.warnings.append(
            f"{manifest.folder} has {sequences} validation sequences, data.validation_sequences is {requested}"
        )


def _sequences(report: Report, config: Config, manifest: Manifest, split: str) -> int:
    """Sequences of a split; 0 after adding what the run's own loader says against it."""
    sizes: dict[str, Any] = {"seq_len": config.training.seq_len, "vocab_size": config.model.vocab_size}
    rank: dict[str, Any] = {"local_batch_size": 1, "dp_rank": 0, "dp_world_size": 1}
    loader = _tried(report, lambda: GlobalOrderLoader(manifest.folder, split, **sizes, **rank))
    return loader.sequences.length if loader else 0


def _manifest(report: Report, key: str, path: str, needs_data: bool) -> Manifest | None:
    try:
        return Manifest.read(path)
    except UserError as error:
        remedy = "; create it with `python -m pc_recipe.data.demo`" if Path(path) == DEMO else ""
        (report.fail if needs_data else report.warnings.append)(f"{key}: {error}{remedy}")
        return None
