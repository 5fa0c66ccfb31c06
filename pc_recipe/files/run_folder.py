"""A run's folder: its state, its configuration, its checkpoints."""

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict
from typing_extensions import TypedDict

from pc.errors import UserError
from pc_recipe.files import look, record
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.lock import is_locked
from pc_recipe.files.places import CONFIG, ENVIRONMENT, checkpoints_of, run_of
from pc_recipe.files.record import Malformed, Tables
from pc_recipe.files.run_log import find_last_step

INDEX = ".metadata"
"""It is written last, so a checkpoint that has it is complete."""
CHECKSUMS = "XXH128SUMS"
"""It is written just before the index."""
_STATUS = "status.json"
_HAS_SAVED = "has_checkpoints"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
"""Matches the whole name of a checkpoint's folder: nothing with another name is used as one, or deleted."""
_DAMAGED = re.compile(r"step-([0-9]+)(\.damaged)+")
_PURGED = re.compile(r"step-[0-9]+\.purged")
_EARLIER = re.compile(r"config\.[1-9][0-9]*\.toml")
State = Literal["waiting", "running", "interrupted", "stopped", "finished", "failed", "diverged"]


@dataclass(frozen=True)
class RunState:
    """Progress of a run."""

    state: State
    step: int
    steps: int
    reason: str = ""
    """Why the run stopped or failed, in one line."""


class _Environment(TypedDict, total=False):
    """The keys that are read from environment.json, which has more."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    data: dict[str, str] | None
    gpus: list[str]
    world_size: int
    earlier: list["_Environment"]


def read_state(folder: Path) -> RunState:
    """The state in status.json; "interrupted" if it is "running", or damaged, and no process holds the lock."""
    file, locked = folder / _STATUS, is_locked(folder)
    try:
        state = record.read(file, RunState) or RunState("running" if locked else "waiting", 0, 0)
    except Malformed:
        state = RunState("running", 0, 0, f"{file} cannot be read")
    return replace(state, state="interrupted") if state.state == "running" and not locked else state


def write_state(folder: Path, state: State, step: int, steps: int, reason: str = "") -> None:
    """`state` is running, stopped, finished, failed or diverged."""
    write_atomically(folder / _STATUS, json.dumps(asdict(RunState(state, step, steps, reason))) + "\n")


def write_failure(folder: Path, reason: str, step: int = 0, state: State = "failed") -> None:
    """Mark the run as `state`, "failed" or "diverged", unless it finished or diverged before.

    A later attempt in its folder, or another rank, may fail in another way. step: used if it is after that in status.json.
    """
    known = read_state(folder)
    if known.state not in ("finished", "diverged"):
        write_state(folder, state, max(step, known.step), known.steps, reason)


def list_runs(folder: Path) -> list[Path]:
    """The folders of all runs in a folder, at any depth but not behind links, sorted."""
    return sorted(Path(entry).parent for entry in look.everything_in(folder) if entry.name == CONFIG)


def list_configs(run: Path) -> list[Path]:
    """config.toml, then config.1.toml and so on: the different configs of earlier parts of the run."""
    earlier = [run / name for name in look.names(run) if _EARLIER.fullmatch(name)]
    return [run / CONFIG, *sorted(earlier, key=_number_of)]


def _number_of(earlier: Path) -> int:
    return int(earlier.suffixes[0][1:])


def read_first_config(run: Path) -> dict[str, Any]:
    """The configuration with which a run began; empty if it cannot be read."""
    try:
        return record.read(list_configs(run)[:2][-1], Tables) or {}
    except Malformed:
        return {}


def read_environment(run: Path) -> dict[str, Any]:
    """What environment.json says of a run's machine, code and data; empty if it is missing or damaged."""
    try:
        return record.read(run / ENVIRONMENT, _Environment) or {}
    except Malformed:
        return {}


def read_parts(run: Path) -> list[dict[str, Any]]:
    """`read_environment`, then those of earlier parts of the run, with other code, data or machines; newest first."""
    newest = read_environment(run)
    return [newest, *newest.pop("earlier", [])]


def keep_earlier_config(run: Path, resolved: dict, step: int) -> None:
    """Before `resolved` replaces config.toml: keep the old one if it differs and the run continues from `step` > 0."""
    current, *earlier = list_configs(run)
    if step == 0:
        for file in earlier:
            file.unlink()
    elif content := _read_other_config(current, resolved):
        write_atomically(run / f"config.{1 + max(map(_number_of, earlier), default=0)}.toml", content)


def _read_other_config(file: Path, resolved: dict) -> bytes | None:
    """The file's content; None if it is missing or equal to `resolved`."""
    content = look.read(file)
    try:
        return content if content and record.parse(content, file, Tables) != resolved else None
    except Malformed:
        return content


def require_no_other_run(run: Path, resolved: dict) -> None:
    """Raise a `UserError` if a run without checkpoints, which begins at step 1, would mix its records with another's.

    A run with the same config may be repeated.
    """
    other = find_last_step(run) and _read_other_config(run / CONFIG, resolved)
    if list_checkpoints(checkpoints_of(run)) or other:
        raise UserError(
            f"{run} holds another run, which checkpoint.enable = false does not continue; give another --job.dump_folder"
        )


def step_of(checkpoint: Path) -> int:
    """N of a folder step-N, or of what a link of another name leads to; -1 for any other name."""
    match = _STEP.fullmatch(checkpoint.name) or _STEP.fullmatch(checkpoint.resolve().name)
    return int(match[1]) if match else -1


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """{step: folder} of all checkpoints in RUN/checkpoint, complete or not, sorted by step."""
    by_step = {int(match[1]): folder / match[0] for match in map(_STEP.fullmatch, look.names(folder)) if match}
    return dict(sorted(by_step.items()))


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint's folder was written to its end, whatever has become of it since."""
    return look.is_file(checkpoint / INDEX)


def was_complete(checkpoint: Path) -> bool:
    """Whether it is complete, or has lost its index since, for example in a copy without hidden files.

    Torch writes the index under a temporary name, which stays if the process is killed before the rename.
    """
    is_unfinished = look.is_file(checkpoint / f"{INDEX}.tmp")
    return is_complete(checkpoint) or (look.is_file(checkpoint / CHECKSUMS) and not is_unfinished)


def note_saved(run: Path) -> None:
    """Note in a run's folder that a checkpoint was completed: `checkpoint` may be on a disk that gets lost."""
    if not has_saved(run):
        write_atomically(
            run / _HAS_SAVED, "A checkpoint of this run was completed, so it does not begin anew by itself.\n"
        )


def has_saved(run: Path) -> bool:
    return look.is_file(run / _HAS_SAVED)


def list_damaged(folder: Path) -> list[Path]:
    """Checkpoints in RUN/checkpoint that were renamed because they could not be used, sorted by step."""
    matches = filter(None, map(_DAMAGED.fullmatch, look.names(folder)))
    return [folder / match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def purge(checkpoint: Path) -> None:
    """Rename a checkpoint before it is deleted, so that a kill in between leaves none that looks complete."""
    checkpoint.rename(f"{checkpoint}.purged")


def list_purged(folder: Path) -> list[Path]:
    """Checkpoints to delete, including those that a killed process left."""
    return [folder / name for name in look.names(folder) if _PURGED.fullmatch(name)]


def list_complete(folder: Path) -> dict[int, Path]:
    """Those of `list_checkpoints` that are complete."""
    return {step: path for step, path in list_checkpoints(folder).items() if is_complete(path)}


def find_newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint in a run's folder, without verifying its checksums."""
    return next(reversed(list_complete(checkpoints_of(run)).values()), None)


def find_newest_step(run: Path) -> int:
    """Step of `find_newest_checkpoint`; 0 if there is none."""
    return next(reversed(list_complete(checkpoints_of(run))), 0)


def parse_model(text: str) -> tuple[str, Path]:
    """Name and path of `PATH` or `NAME=PATH`; a path may contain "=", a name may not. A run stands for its newest checkpoint."""
    name, path = ("", text) if look.is_there(text) else text.partition("=")[::2]
    if not look.is_there(path):
        raise UserError(f"{text}: no such model; expected a run, a checkpoint (RUN/checkpoint/step-N) or an export")
    model = find_newest_checkpoint(Path(path)) or Path(path)
    whole = model.resolve()
    run = run_of(whole)
    return name or (f"{run.name} {whole.name}" if whole.parent == checkpoints_of(run) else whole.name), model
