"""The log of a run, metrics.jsonl: one JSON object per logged step."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pc.errors import UserError
from pc_recipe.files import json_lines, look

if TYPE_CHECKING:
    import pandas as pd

METRICS_FILE = "metrics.jsonl"
VALIDATION = "validation_loss"
"""The logged metric by which runs are compared, in nats per token."""
BITS_PER_BYTE = "validation_bits_per_byte"
"""The same loss per byte of text, so not in units of one tokenizer, where that says how many bytes a token is. `report.py`
still refuses two tokenizers, because so many sequences are then other text."""
RESUMED_FROM = "resumed_from"
"""Alone in a line, without other keys: training continued after this step."""


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

        by_step = {line["step"]: line for line in self.lines if {key, over} <= line.keys()}
        if remedy and not by_step:
            raise UserError(f"{self.file}: no {key!r} was logged; {remedy}")
        lines = [by_step[step] for step in sorted(by_step)]
        return pd.Series([line[key] for line in lines], [line[over] for line in lines], dtype=float)

    def seconds(self, remedy: str = "") -> "pd.Series":
        """Seconds of training up to each logged step, without validation, checkpoints and pauses; like `series`."""
        taken = self.series("step_seconds", remedy=remedy)
        return (taken * (taken.index - [0, *taken.index[:-1]])).cumsum()


def read_log(run: Path, newest: int | None = None) -> RunLog:
    """Read the metrics of a run's folder: all lines or the `newest`; none if nothing was logged yet. Damaged lines are left
    out, and those of steps that a resume discarded."""
    file = run / METRICS_FILE
    newest_first: Iterable[dict] = ()
    if look.is_file(file):
        newest_first = json_lines.read_back(file) if newest else reversed(json_lines.read(file))
    return RunLog(name=file.resolve().parent.name, file=file, lines=[*islice(_kept(newest_first), newest)][::-1])


def _kept(newest_first: Iterable[dict]) -> Iterator[dict]:
    """The lines of steps that no later resume discarded, newest first."""
    last = math.inf
    for line in newest_first:
        if isinstance(resumed := line.get(RESUMED_FROM), int):
            last = min(last, resumed)
        elif type(line.get("step")) is int and line["step"] <= last and all(map(_is_usual, line.values())):
            yield line


def _is_usual(value: object) -> bool:
    """A number or null, as the trainer logs them; someone else may have written the file."""
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def find_last_step(run: Path) -> int:
    """The last step that was logged; 0 without a log."""
    return max((line["step"] for line in read_log(run, newest=1).lines), default=0)


def note_start(run: Path, step: int) -> None:
    """Note in an existing log that training continues after `step`: lines of later steps no longer count."""
    if look.is_file(run / METRICS_FILE):
        json_lines.append(run / METRICS_FILE, {RESUMED_FROM: step})


def read_logs(runs: Sequence[Path]) -> list[RunLog]:
    """The logs of runs, each named by as much of its folder's path as is needed. A run given twice is read once.

    Raises:
        UserError: one has no log.
    """
    logs = {log.file.resolve().parent: log for log in map(read_log, runs)}
    for log in logs.values():
        if not look.is_file(log.file):
            raise UserError(f"{log.file}: no such file; give a run's folder, which holds {METRICS_FILE}")
    return [replace(log, name=name) for log, name in zip(logs.values(), unique_names(list(logs)), strict=True)]


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many of its last parts as are needed to tell them apart."""
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(set(folders)):  # one may be given twice
            return names
        depth += 1


def describe_seconds(seconds: float | None) -> str:
    """ "0:01:20 left"; "" for None."""
    return "" if seconds is None else f"{timedelta(seconds=round(seconds))} left"
