"""Finds errors in a config in seconds, without a GPU.

`check` has four parts, and no two check the same thing. A launcher may stop after each: all but `check_on_ranks` answer
within a second, because it alone imports torch, which takes seconds.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pc.errors import UserError
from pc_recipe.config import Config, load_config, read_earlier, rules, run_key
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.config.schema import Data
from pc_recipe.data.manifest import Manifest, require_different, require_same_tokenizer
from pc_recipe.data.tokenizers import smallest_dtype
from pc_recipe.files import look
from pc_recipe.files.places import CONFIG
from pc_recipe.files.run_folder import find_newest_checkpoint, find_newest_step, read_state
from pc_recipe.plan.installed import require_compiler, require_wandb
from pc_recipe.train.inputs import result_key

if TYPE_CHECKING:
    from pc_recipe.plan.memory import Sizes

LINES = (
    "fits", "micro-batch", "batch", "steps", "tokens", "time", "time limit", "disk", "training data", "validation data",
    "parameters", "preconditioned", "memory per GPU",
)  # fmt: skip
"""What a dry run says, in this order."""


@dataclass
class CheckResult:
    """What a dry run has found."""

    config: Config
    """`check_on_ranks` fills in its micro-batch."""
    facts: list[tuple[str, str]] = field(default_factory=list)
    """(one of `LINES`, text)"""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    can_build: bool = True
    """Whether its model can be built."""
    batches: RankBatches | None = None
    """After `check_layout`; None if the config does not fit."""
    start: str | None = None
    """The weights that a new run starts from; None if it continues, or starts from none."""
    train: dict[str, Manifest | None] = field(default_factory=dict)
    """{folder of training data: its manifest, None if that is missing}"""
    validation: dict[str, Manifest | None] = field(default_factory=dict)

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
    """Check a run on `world_size` GPUs; the arguments are those of the four parts."""
    result = check_settings(config)
    check_data(result, needs_data)
    check_layout(result, world_size)
    check_on_ranks(result, gpu_gib)
    return result


def check_settings(config: Config) -> CheckResult:
    """What is wrong on any number of GPUs."""
    result = CheckResult(config, errors=list(rules.anywhere(config)))
    result.can_build = not result.errors
    optimizer = config.optimizer
    result.warnings += [
        f"optimizer.{key} is set, but {optimizer.name} does not read it" for key in optimizer.list_unread()
    ]
    _check_steps(result, config)
    _try(result, require_wandb, config)
    if has_finished(config):
        _check_finished(result, config)
    elif config.checkpoint.enable and find_newest_checkpoint(config.folder):
        _check_resume(result, config)
    elif config.checkpoint.enable:
        result.start = config.checkpoint.initial_load_path
    if result.start and not look.is_there(result.start):
        result.add_error(f"checkpoint.initial_load_path: {result.start} does not exist")
    return result


def check_data(result: CheckResult, needs_data: bool = True) -> None:
    """Whether the folders of data are there and fit together.

    Args:
        needs_data: report missing data as an error; otherwise as a warning with the command that creates them.
    """
    section = result.config.data
    result.train = {folder: _read_manifest(result, "data.path", folder, needs_data) for folder in section.folders}
    result.validation = result.train
    if section.validation_path:
        key = "data.validation_path"
        result.validation = {section.validation_path: _read_manifest(result, key, section.validation_path, needs_data)}
    _try(result, require_different, _known(result.train))
    manifests = _known(result.train | result.validation)
    for other in manifests[1:]:
        _try(result, require_same_tokenizer, manifests[0], other)


def check_layout(result: CheckResult, world_size: int) -> None:
    """Whether the config fits `world_size` GPUs; if its micro-batch is not chosen yet, whether any divides its batch."""
    result.batches = _try(result, RankBatches.of, result.config, world_size)
    if not result.batches:
        return
    if result.config.training.local_batch_size == -1:
        _try(result, result.batches.micro_batch_sizes)
        return
    # the trainer's rules, without those for CPUs, because the run may use another machine
    for finding in rules.on_ranks(result.config, result.batches.dims):
        result.add_error(finding)


def check_on_ranks(result: CheckResult, gpu_gib: float | None = None) -> None:
    """What the model needs, and what the run needs of its GPUs, after `check_layout`; the micro-batch is chosen here.

    Args:
        gpu_gib: as in `pc_recipe.plan.micro_batch.find_gpu`.
    """
    from pc_recipe.plan import memory, micro_batch, needs

    gpu, sizes = micro_batch.find_gpu(gpu_gib), None
    if result.can_build:
        sizes = memory.count_sizes(result.config)
        if result.batches:
            before, world_size = result.config.training.local_batch_size, result.batches.dims.world_size
            result.config = _try(result, micro_batch.choose, result.config, world_size, gpu, sizes) or result.config
            if before == -1:
                check_layout(result, world_size)
    config, batches, tokens, writes = result.config, result.batches, 0, []
    if batches and config.training.local_batch_size != -1:  # else nothing fits, or there is no model
        tokens = config.training.steps * _check_batch(result, config, batches)
        if sizes:
            facts, warning = _try(result, needs.describe_memory, config, batches, sizes, gpu) or ({}, "")
            result.facts += facts.items()
            result.warnings += [warning] if warning else []
    _check_start(result, config)
    if sizes:
        _check_model(result, config, sizes)
        if config.checkpoint.enable:
            writes.append(needs.checkpoints_on_disk(config, sizes))
    _check_size_of_data(result, config, tokens)
    width = np.dtype(smallest_dtype(config.model.vocab_size)).itemsize
    missing = [folder for folder, manifest in result.train.items() if manifest is None]
    writes += [needs.data_on_disk(folder, _share(config, folder) * tokens, width) for folder in missing if tokens]
    text, warnings = needs.describe_disk(writes)
    result.warnings += warnings
    result.facts += [("disk", text)] if text else []
    try:
        require_compiler(config)
    except UserError as error:  # an error where the run starts, but that may be another machine
        result.warnings.append(f"on this machine {error}")


def estimate_hours(result: CheckResult, world_size: int, tflops: float | None = None) -> float:
    """The hours of a run that has no errors, also added to the result's facts. Takes seconds with activation checkpointing.

    Args:
        tflops: as in `pc_recipe.plan.cost.RunCost.gpu_hours`.
    """
    from pc_recipe.plan import cost

    run_cost = cost.RunCost(result.config, world_size)
    gpu_hours = run_cost.gpu_hours(tflops)
    rate = f"{tflops or cost.assume_tflops(run_cost.shape.dim):.3g} TFLOP/s per GPU, "
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
    """Tokens per optimizer step, 0 if the batch is not a whole number of micro-batches."""
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


def has_finished(config: Config) -> bool:
    """Whether the run in this config's folder has trained all its steps before."""
    folder = config.folder
    state = read_state(folder)  # names of checkpoints alone may be wrong; some may have been moved out to go back
    return state.state == "finished" and state.step == find_newest_step(folder) == config.training.steps


def _check_finished(result: CheckResult, config: Config) -> None:
    folder = config.folder
    earlier = _try(result, load_config, folder / CONFIG)
    if earlier and (changed := run_key.differing_keys(result_key(earlier), result_key(config))):
        result.add_error(f"{folder} has finished with another {', '.join(changed)}; give another --job.dump_folder")


def _check_resume(result: CheckResult, config: Config) -> None:
    """Whether the run in this config's folder can continue with these weights; the trainer checks its checkpoint again."""
    folder = config.folder
    before, now = run_key.weights_key(_try(result, read_earlier, folder) or config), run_key.weights_key(config)
    for key in run_key.differing_keys(before, now)[:1]:
        result.add_error(
            f"{key} is {before.get(key)} in the run of {folder}, {now.get(key)} in the config; use the run's, or another "
            "job.dump_folder to start a new run"
        )


def _check_start(result: CheckResult, config: Config) -> None:
    """Whether the weights that a new run starts from have the format that the config says, and the data's tokenizer."""
    section, start = config.checkpoint, result.start
    if not start or not look.is_there(start):
        return
    from pc_recipe.checkpoints import run_tokenizer
    from pc_recipe.checkpoints.folder import CheckpointFolder

    try:
        weights = Path(start) if section.initial_load_in_hf else CheckpointFolder(Path(start))
        if section.initial_load_in_hf and not look.is_file(Path(start, "config.json")):
            raise UserError(f"{start}: no config.json in it, so it is no Hugging Face folder")
    except UserError as error:
        result.add_error(f"checkpoint.initial_load_path: {error}")
        return
    first = next(iter(result.train.values()), None)
    if first and not section.initial_load_tokenizer_is_the_same:
        _try(result, run_tokenizer.require_for_start, weights, first)


def _check_model(result: CheckResult, config: Config, sizes: "Sizes") -> None:
    from pc.inverse import require_invertible
    from pc.method import method_of
    from pc_recipe.plan.needs import describe_pc

    outside = sizes.total - sizes.outside_blocks
    result.facts.append(("parameters", f"{sizes.total:,}, {outside:,} without embedding and head"))
    if not config.pc.enable:
        return
    pc_config = config.pc.pc_config
    loads = config.checkpoint.enable and config.checkpoint.initial_load_path
    for block in pc_config.blocks if loads and config.pc.start == "preserve" else ():
        _try(result, require_invertible, method_of(pc_config.for_block(block)))
    share = sizes.preconditioned / sizes.total
    what = f"{sizes.preconditioned:,} weights ({share:.0%}), {describe_pc(pc_config)}"
    result.facts.append(("preconditioned", what))


def _known(manifests: dict[str, Manifest | None]) -> list[Manifest]:
    return [manifest for manifest in manifests.values() if manifest]


def _share(config: Config, folder: str) -> float:
    """A folder's share of the training sequences."""
    folders = config.data.folders
    return folders[folder] / sum(folders.values())


def _check_size_of_data(result: CheckResult, config: Config, tokens: int) -> None:
    """Whether the data are enough for a run over `tokens` tokens."""
    from pc_recipe.data.inspection import list_repeated

    for folder, manifest in result.train.items():
        if manifest:
            _check_training(result, config, manifest, _share(config, folder), tokens)
    validation = _known(result.validation)
    for manifest in validation if config.validation.enable else ():
        _check_validation(result, config, manifest)
    result.warnings += _try(result, list_repeated, _known(result.train), validation) or ()


def _check_training(result: CheckResult, config: Config, manifest: Manifest, share: float, needed_tokens: int) -> None:
    tokens = manifest.tokens("train")
    whole = "" if share == 1 else f"{share:.1%} of the sequences, "
    tokenizer, rows = manifest.tokenizer, config.model.vocab_size
    entries = "" if tokenizer.vocab_size == rows else f", {tokenizer.vocab_size:,} entries of the model's {rows:,}"
    line = f"{manifest.folder}: {whole}{tokens:,} tokens, tokenizer {tokenizer.name}{entries}"
    result.facts.append(("training data", line))
    if _count_sequences(result, config, manifest, "train") == 0:
        return
    epochs, most = needed_tokens * share / tokens, config.data.max_epochs
    which = "its" if share == 1 else f"{manifest.folder}:"
    repeats = f"the run repeats {which} {tokens:,} training tokens {epochs:,.1f} times"
    if epochs > most:
        result.add_error(f"{repeats}; data.max_epochs = {most} allows fewer")
    elif epochs > 1:
        result.warnings.append(repeats)


def _check_validation(result: CheckResult, config: Config, manifest: Manifest) -> None:
    sequences, requested = _count_sequences(result, config, manifest, "validation"), config.data.validation_sequences
    result.facts.append(("validation data", f"{min(sequences, requested)} sequences of {config.training.seq_len}"))
    if 0 < sequences < requested:  # 0 is an error
        result.warnings.append(
            f"{manifest.folder} has {sequences} validation sequences, data.validation_sequences is {requested}"
        )


def _count_sequences(result: CheckResult, config: Config, manifest: Manifest, split: str) -> int:
    """Sequences of a split; 0 after adding the error that the run's own loader raises."""
    from pc_recipe.data.loader import GlobalOrderLoader

    sizes: dict[str, Any] = {"seq_len": config.training.seq_len, "vocab_size": config.model.vocab_size}
    rank: dict[str, Any] = {"local_batch_size": 1, "dp_rank": 0, "dp_world_size": 1}
    loader = _try(result, lambda: GlobalOrderLoader(manifest.folder, split, **sizes, **rank))
    return loader.sequences.length if loader else 0


def _read_manifest(result: CheckResult, key: str, path: str, needs_data: bool) -> Manifest | None:
    try:
        return Manifest.read(path)
    except UserError as error:
        remedy = "; create it with `python -m pc_recipe.data.demo`" if path == Data().path else ""
        (result.add_error if needs_data else result.warnings.append)(f"{key}: {error}{remedy}")
        return None
