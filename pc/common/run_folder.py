"""Reads and writes a run's folder: state, lock, checkpoints, metrics."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import tomllib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pc.common import json_lines
from pc.common.files import write_atomically
from pc.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

METRICS = "metrics.jsonl"
"""one JSON object per line"""
INDEX = ".metadata"
"""written last, so a checkpoint that has it is complete"""
_STATUS = "status.json"
_LOCKS = ("lock", "lock.ranks")
"""of the launcher, alone, and of its ranks, together"""
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
"""the whole name of a checkpoint's folder: nothing with another name is used as one, or deleted"""


# --- state ------------------------------------------------------------------------------------------


STATES = ("waiting", "running", "interrupted", "stopped", "finished", "failed", "diverged")


@dataclass(frozen=True)
class State:
    """Progress of a run."""

    state: str
    """one of `STATES`"""
    step: int
    steps: int
    reason: str = ""
    """why it stopped or failed, in one line"""


def state_of(folder: Path) -> State:
    """The state in status.json; "interrupted" if it says "running" but no process holds the lock, or is damaged."""
    file, locked = folder / _STATUS, is_locked(folder)
    if not file.exists():
        return State("running" if locked else "waiting", 0, 0, "")
    try:
        state = State(**json.loads(file.read_text()))
        if state.state not in STATES:
            raise ValueError(state.state)
    except (OSError, ValueError, TypeError, RecursionError):
        state = State("running", 0, 0, f"{file} cannot be read")
    return replace(state, state="interrupted") if state.state == "running" and not locked else state


def write_state(folder: str | Path, state: str, step: int, steps: int, reason: str = "") -> None:
    """`state` is running, stopped, finished, failed or diverged."""
    write_atomically(Path(folder) / _STATUS, json.dumps(asdict(State(state, step, steps, reason))) + "\n")


def write_failure(folder: str | Path, reason: str, step: int = 0, state: str = "failed") -> None:
    """Mark the run as `state`, "failed" or "diverged", unless it finished or diverged before.

    A later attempt in its folder, or another rank, may fail in another way. step: if it is after that in status.json.
    """
    known = state_of(Path(folder))
    if known.state not in ("finished", "diverged"):
        write_state(folder, state, max(step, known.step), known.steps, reason)


# --- configuration ----------------------------------------------------------------------------------


def configs(run: Path) -> list[Path]:
    """config.toml, and the different ones, config.1.toml and so on, with which earlier parts of a run were trained."""
    return [run / "config.toml", *sorted(run.glob("config.[0-9]*.toml"))]


def keep_earlier_config(run: Path, resolved: dict, step: int) -> None:
    """Before config.toml is replaced by `resolved`: keep it if it differs and the run continues from its `step` > 0."""
    current, *earlier = configs(run)
    if step == 0:
        for file in earlier:
            file.unlink()
    elif current.exists() and _read_toml(current) != resolved:
        current.rename(run / f"config.{len(earlier) + 1}.toml")


def _read_toml(file: Path) -> dict | None:
    """None if it is damaged."""
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None


# --- lock -------------------------------------------------------------------------------------------


def is_locked(folder: Path) -> bool:
    """Whether a process that called `lock` or `join_lock` is alive; also if only the folder's owner can know."""
    return any(_is_held(folder / name) for name in _LOCKS)


def _is_held(file: Path) -> bool:
    try:
        with _open_lock(file, os.O_RDWR) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


def _open_lock(file: Path, flags: int = os.O_RDWR | os.O_CREAT) -> TextIO:
    """Only its owner can open it: a reader who locks a file that he may read would keep its owner from training."""
    return os.fdopen(os.open(file, flags | os.O_APPEND, 0o600), "a")


def _create_lock(file: Path) -> TextIO:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _open_lock(file)
    except PermissionError:
        raise UserError(f"{file} belongs to another user, who alone may train in this folder") from None


def lock(folder: Path, seconds: float = 1) -> TextIO:
    """Keep other processes from training in the same folder. Pass the open file on to the trainer's process.

    The lock lasts while any process holds the file open, or a rank that called `join_lock` lives. So it stays when the
    launcher is killed and ranks still train. The file's modification time is the start of the newest attempt.

    Args:
        seconds: to wait for another process; a moment by default, because `is_locked` may hold it.

    Raises:
        UserError: another process trains there.
    """
    launcher, ranks = (folder / name for name in _LOCKS)
    file = _create_lock(launcher)  # stays open during the run
    for tries_left in reversed(range(round(10 * seconds))):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_held(ranks):
                break
        except BlockingIOError:
            pass
        except OSError as error:
            warnings.warn(f"{folder} cannot be locked ({error.strerror}): start no second trainer there", stacklevel=2)
            break
        if not tries_left:
            file.close()
            raise UserError(f"{folder}: another process is training here")
        time.sleep(0.1)
    os.utime(file.fileno())
    return file


def join_lock(folder: Path) -> TextIO:
    """Keep the lock while this rank lives: torchrun's ranks do not inherit its launcher's file."""
    file = _create_lock(folder / _LOCKS[1])
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


# --- checkpoints ------------------------------------------------------------------------------------


def step_of(checkpoint: str | Path) -> int:
    """N of a folder step-N; -1 for any other name."""
    match = _STEP.fullmatch(Path(checkpoint).resolve().name)
    return int(match[1]) if match else -1


def checkpoints(folder: str | Path) -> dict[int, Path]:
    """{step: folder} of all checkpoints in RUN/checkpoint, complete or not, sorted by step."""
    matches = {path: _STEP.fullmatch(path.name) for path in Path(folder).glob("step-*")}
    found = {int(match[1]): path for path, match in matches.items() if match}
    return dict(sorted(found.items()))


def newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint in a run's folder, without verifying its checksums."""
    complete = [path for path in checkpoints(run / "checkpoint").values() if (path / INDEX).exists()]
    return complete[-1] if complete else None


def newest_step(run: Path) -> int:
    """Step of `newest_checkpoint`; 0 if there is none."""
    return max(0, step_of(newest_checkpoint(run) or ""))


# --- metrics and logs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunLog:
    """A run's name and the lines of its metrics.jsonl, in file order."""

    name: str
    file: Path
    lines: list[dict]

    def keys(self) -> list[str]:
        """All quantities logged at least once, sorted."""
        return sorted({key for line in self.lines for key in line})

    def series(self, key: str, over: str = "step", remedy: str = "") -> "pd.Series":
        """The values logged under `key`, by step or `over` "tokens"; empty if there are none. JSON's null becomes NaN.

        A resumed run logs the steps after its checkpoint again; the last line of a step wins.

        Raises:
            UserError: with the `remedy`, if one is given, where nothing was logged.
        """
        import pandas as pd  # here, because launchers answer mistakes before this takes a second

        by_step = {line["step"]: line for line in self.lines if key in line}
        if remedy and not by_step:
            raise UserError(f"{self.file}: no {key!r} was logged; {remedy}")
        lines = [by_step[step] for step in sorted(by_step)]
        return pd.Series([line[key] for line in lines], [line[over] for line in lines], dtype=float)


def read_log(path: str | Path, newest: int | None = None) -> RunLog:
    """Read the metrics of a run folder, or a `metrics.jsonl` file: all lines or the `newest`, without damaged ones."""
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a run's folder, which holds {METRICS}")
    if newest is None:
        lines = json_lines.read(file)
    else:
        lines = [line for _, line in islice(json_lines.read_back(file), newest)][::-1]
    return RunLog(name=file.resolve().parent.name, file=file, lines=lines)


def set_aside_metrics(run: Path, step: int) -> None:
    """Move the lines of metrics.jsonl after `step` to metrics.abandoned.jsonl: training continues from there."""
    file = run / METRICS
    kept = size = file.stat().st_size if file.exists() else 0
    for begin, line in json_lines.read_back(file) if size else ():
        if line["step"] <= step:
            break
        kept = begin
    if kept < size:
        with open(file, "rb") as metrics, open(file.with_suffix(".abandoned.jsonl"), "ab") as abandoned:
            metrics.seek(kept)
            shutil.copyfileobj(metrics, abandoned)
        os.truncate(file, kept)


def read_logs(paths: Sequence[str | Path]) -> list[RunLog]:
    """Several runs with unique names: as much of each folder's path as is needed. One given twice is read once."""
    logs = {log.file.resolve().parent: log for log in map(read_log, paths)}
    return [replace(log, name=name) for log, name in zip(logs.values(), unique_names(list(logs)), strict=True)]


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many of its last parts as are needed to tell them apart."""
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(set(folders)):  # one may be given twice
            return names
        depth += 1


def time_left(steps: Sequence[int], times: Sequence[float], last: int) -> str:
    """The estimated time to the step `last`, such as "about 0:12:30 left"; "" with fewer than two different steps.

    Args:
        steps: steps completed at `times`, in seconds.
    """
    if len(steps) < 2 or steps[-1] <= steps[0]:
        return ""
    seconds = (times[-1] - times[0]) / (steps[-1] - steps[0]) * max(0, last - steps[-1])
    return f"about {timedelta(seconds=round(seconds))} left"
