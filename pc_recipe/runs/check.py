"""Finds errors in a config in seconds, without a GPU."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pc.errors import UserError
from pc.method import method_of
from pc_recipe.config import Config, rules
from pc_recipe.config.pc_section import PC
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.data.demo import FOLDER as DEMO
from pc_recipe.data.inspection import list_repeated
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.data.manifest import Manifest, require_different, require_same_tokenizer
from pc_recipe.data.tokenizers import smallest_dtype
from pc_recipe.files import look
from pc_recipe.files.run_folder import find_newest_checkpoint
from pc_recipe.runs import cost, memory, micro_batch, needs, torchrun
from pc_recipe.runs.cost import describe_pc
from pc_recipe.train import run_tokenizer
from pc_recipe.train.checkpoint_folder import CheckpointFolder

LINES = (
    "fits", "micro-batch", "batch", "steps", "tokens", "time", "time limit", "disk", "training data", "validation data",
    "parameters", "preconditioned", "memory per GPU",
)  # fmt: skip
"""What a dry run says, in this order."""


@dataclass
class CheckResult:
    """What a dry run has found."""

    config: Config
    """With its micro-batch."""
    facts: list[tuple[str, str]] = field(default_factory=list)
    """(one of `LINES`, text)"""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_error(self, error: str) -> None:
        """Add an error, unless another check has found the same."""
        if error not in self.errors:
            self.errors.append(error)

    def raise_errors(self, where: str = "") -> None:
        """For launchers: raise one `UserError` with all errors."""
        if self.errors:
            raise UserError(where + "\nerror: ".join(self.errors))

    def text(self) -> str:
        facts = sorted(self.facts, key=lambda fact: LINES.index(fact[0]))
        lines = [f"{name:<16} {value}" for name, value in facts]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"error: {error}" for error in self.errors]
        return "\n".join(lines)


def check(config: Config, world_size: int, *, needs_data: bool = True, gpu_gib: float | None = None) -> CheckResult:
    """Check a run on `world_size` GPUs.

    Args:
        gpu_gib: as in `pc_recipe.runs.micro_batch.find_gpu`.
        needs_data: report missing data as an error; otherwise as a warning with the command that creates them.
    """
    result = CheckResult(config, errors=list(rules.findings(config)))
    is_valid = not result.errors
    choice = _try(result, micro_batch.choose, config, world_size, gpu_gib) if is_valid else None
    result.config = config = choice.config if choice else config
    batches = _try(result, RankBatches.of, config, world_size) if choice or not is_valid else None
    tokens = 0
    if batches:
        tokens = config.training.steps * _check_batch(result, config, batches)
        # the trainer's rules, without those for CPUs, because the run may use another machine
        for finding in rules.findings(config, batches.dims):
            result.add_error(finding)
    _check_steps(result, config)
    _check_initial_load(result, config)
    writes = []
    if is_valid:
        sizes = _check_model(result, config)
        if batches and choice:
            _try(result, _check_memory, result, batches, sizes, choice.gpu)
        if config.checkpoint.enable:
            writes.append(needs.checkpoints_on_disk(config, sizes))
    missing = _check_data(result, config, needs_data, tokens)
    width = np.dtype(smallest_dtype(config.model.vocab_size)).itemsize
    writes += [needs.data_on_disk(folder, share * tokens, width) for folder, share in missing.items() if tokens]
    _check_disk(result, writes)
    _check_installed(result, config)
    return result


def estimate_hours(result: CheckResult, world_size: int, tflops: float | None = None) -> float:
    """Hours of a run without errors, which are added to the result's facts. It takes seconds.

    Args:
        tflops: as in `pc_recipe.runs.cost.RunCost.gpu_hours`.
    """
    run_cost = cost.RunCost(result.config, world_size)
    gpu_hours = run_cost.gpu_hours(tflops)
    rate = f"{tflops or cost.assume_tflops(run_cost.args.dim):.3g} TFLOP/s per GPU, "
    rate += "given" if tflops else "assumed: of an H100, at most 40 % of its peak"
    hours = gpu_hours / world_size
    long = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
    result.facts.append(("time", f"{long}, {gpu_hours:,.{0 if gpu_hours >= 100 else 2}f} GPU-hours at {rate}"))
    return hours


def _try(result: CheckResult, function, *arguments):
    """The function's result, or None after adding its `UserError` as an error."""
    try:
        return function(*arguments)
    except UserError as error:
        result.add_error(str(error))
        return None


def _check_batch(result: CheckResult, config: Config, batches: RankBatches) -> int:
    """Tokens per optimizer step, 0 if the batch does not divide."""
    training = config.training
    if _try(result, lambda: batches.micro_batches) is None:
        return 0
    result.facts += [
        (
            "batch",
            f"{batches.sequences} sequences = {training.local_batch_size} per GPU x {batches.data_ranks} data-parallel "
            f"ranks x {batches.micro_batches} micro-batches, {batches.tokens:,} tokens",
        ),
        ("steps", f"{training.steps:,}, warmup {config.lr_scheduler.warmup_steps:,}"),
        ("tokens", f"{training.steps * batches.tokens:,}"),
    ]
    return batches.tokens


def _check_steps(result: CheckResult, config: Config) -> None:
    schedule = config.lr_scheduler
    key, steps = "training.steps", config.training.steps
    if schedule.total_steps:
        key, steps = "lr_scheduler.total_steps", schedule.total_steps
    if schedule.warmup_steps > steps:
        result.add_error(f"lr_scheduler.warmup_steps = {schedule.warmup_steps} should be at most {key} = {steps}")
    if not config.checkpoint.enable:
        result.warnings.append("checkpoint.enable is false: an interrupted run starts again from step 0")
        return
    if config.checkpoint.last_save_model_only:
        result.warnings.append("checkpoint.last_save_model_only is true: the last checkpoint cannot be resumed")


def _check_initial_load(result: CheckResult, config: Config) -> None:
    """Whether there is what a new run starts from, in the format that it says."""
    section = config.checkpoint
    start = section.enable and section.initial_load_path
    if not start or find_newest_checkpoint(Path(config.job.dump_folder)):
        return
    try:
        weights: Path | CheckpointFolder = Path(start) if section.initial_load_in_hf else CheckpointFolder(start)
        if section.initial_load_in_hf and not look.is_file(Path(start, "config.json")):
            raise UserError(f"{start}: no config.json in it, which a Hugging Face folder has")
    except UserError as error:
        result.add_error(f"checkpoint.initial_load_path: {error}")
        return
    if not section.initial_load_tokenizer_is_the_same:
        with suppress(UserError):  # `_check_data` reports it
            data = Manifest.read(next(iter(config.data.folders)))
            _try(result, run_tokenizer.require_for_start, weights, data)


def _check_model(result: CheckResult, config: Config) -> memory.Sizes:
    sizes = memory.count_sizes_of_config(config)
    parameters = memory.count_sizes_of_config(config.model_copy(update={"pc": PC()})).total
    result.facts.append(
        ("parameters", f"{parameters:,}, {parameters - sizes.outside_blocks:,} without embedding and head")
    )
    loads = config.checkpoint.enable and config.checkpoint.initial_load_path
    if config.pc.enable and loads and config.pc.start == "preserve":
        pc_config = config.pc.pc_config
        for block in pc_config.blocks:
            _try(result, method_of(pc_config.for_block(block)).require_invertible)
    if config.pc.enable:
        share = sizes.preconditioned / parameters
        what = describe_pc(config.pc.pc_config)
        result.facts.append(("preconditioned", f"{sizes.preconditioned:,} weights ({share:.0%}), {what}"))
    return sizes


def _check_memory(result: CheckResult, batches: RankBatches, sizes: memory.Sizes, gpu: micro_batch.Gpu) -> None:
    facts, warning = needs.describe_memory(result.config, batches, sizes, gpu)
    result.facts += facts.items()
    if warning:
        result.warnings.append(warning)


def _check_disk(result: CheckResult, writes: list[needs.OnDisk]) -> None:
    text, warnings = needs.describe_disk(writes)
    result.warnings += warnings
    if text:
        result.facts.append(("disk", text))


def _check_installed(result: CheckResult, config: Config) -> None:
    _try(result, torchrun.require_wandb, config)
    if config.compile.enable:
        try:
            torchrun.require_compiler()
        except UserError as error:  # an error where the run starts, which may be another machine
            result.warnings.append(f"on this machine {error}")


def _check_data(result: CheckResult, config: Config, needs_data: bool, tokens: int) -> dict[str, float]:
    """Check the data for a run over `tokens` tokens; returns {folder of training data that is missing: its share}."""
    section = config.data
    train = {folder: _read_manifest(result, "data.path", folder, needs_data) for folder in section.folders}
    validation = train
    if section.validation_path:
        key = "data.validation_path"
        validation = {section.validation_path: _read_manifest(result, key, section.validation_path, needs_data)}
    _try(result, require_different, [manifest for manifest in train.values() if manifest])
    manifests = [manifest for manifest in (train | validation).values() if manifest]
    for other in manifests[1:]:
        _try(result, require_same_tokenizer, manifests[0], other)
    shares = {folder: weight / sum(section.folders.values()) for folder, weight in section.folders.items()}
    for folder, manifest in train.items():
        if manifest:
            _check_training(result, config, manifest, shares[folder], tokens)
    for manifest in validation.values() if config.validation.enable else ():
        if manifest:
            _check_validation(result, config, manifest)
    known = [[manifest for manifest in split.values() if manifest] for split in (train, validation)]
    result.warnings += _try(result, list_repeated, *known) or ()
    return {folder: share for folder, share in shares.items() if train[folder] is None}


def _check_training(result: CheckResult, config: Config, manifest: Manifest, share: float, needed_tokens: int) -> None:
    tokens = manifest.tokens("train")
    whole = "" if share == 1 else f"{share:.1%} of the sequences, "
    line = f"{manifest.folder}: {whole}{tokens:,} tokens, tokenizer {manifest.tokenizer.name}"
    result.facts.append(("training data", line))
    if _count_sequences(result, config, manifest, "train") > 0 and tokens < needed_tokens * share:
        which = "its" if share == 1 else f"{manifest.folder}:"
        result.warnings.append(
            f"the run repeats {which} {tokens:,} training tokens {needed_tokens * share / tokens:.1f} times"
        )


def _check_validation(result: CheckResult, config: Config, manifest: Manifest) -> None:
    sequences, requested = _count_sequences(result, config, manifest, "validation"), config.data.validation_sequences
    result.facts.append(("validation data", f"{min(sequences, requested)} sequences of {config.training.seq_len}"))
    if sequences < requested:
        result.warnings.append(
            f"{manifest.folder} has {sequences} validation sequences, data.validation_sequences is {requested}"
        )


def _count_sequences(result: CheckResult, config: Config, manifest: Manifest, split: str) -> int:
    """Sequences of a split; 0 after adding the error that the run's own loader raises."""
    sizes: dict[str, Any] = {"seq_len": config.training.seq_len, "vocab_size": config.model.vocab_size}
    rank: dict[str, Any] = {"local_batch_size": 1, "dp_rank": 0, "dp_world_size": 1}
    loader = _try(result, lambda: GlobalOrderLoader(manifest.folder, split, **sizes, **rank))
    return loader.sequences.length if loader else 0


def _read_manifest(result: CheckResult, key: str, path: str, needs_data: bool) -> Manifest | None:
    try:
        return Manifest.read(path)
    except UserError as error:
        remedy = "; create it with `python -m pc_recipe.data.demo`" if Path(path) == DEMO else ""
        (result.add_error if needs_data else result.warnings.append)(f"{key}: {error}{remedy}")
        return None
