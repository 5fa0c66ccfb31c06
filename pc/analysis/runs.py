"""Reading what a run logged: `metrics.jsonl`, one JSON object per line."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pc.errors import UserError

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Series:
    """One logged quantity: `values[i]` at optimizer step `steps[i]`, after `tokens[i]` training tokens."""

    steps: list[int]
    tokens: list[int]
    values: list[float]


@dataclass(frozen=True)
class Run:
    """A run's name and its logged lines, in the order they were written."""

    name: str
    file: Path
    lines: list[dict]

    def keys(self) -> list[str]:
        """Every quantity that was logged at least once, sorted."""
        return sorted({key for line in self.lines for key in line})

    def series(self, key: str) -> Series:
        """What was logged under `key`, by step; empty if nothing was. A null, which JSON has for NaN, is NaN.

        A resumed run logs again the steps after its checkpoint: the last line of a step wins.
        """
        by_step = {line["step"]: line for line in self.lines if key in line}
        steps = sorted(by_step)
        return Series(
            steps=steps,
            tokens=[by_step[step].get("tokens", step) for step in steps],
            values=[math.nan if (value := by_step[step][key]) is None else value for step in steps],
        )

    def require(self, key: str, remedy: str) -> Series:
        """`series(key)`, or a `UserError` that says what to set so that it is logged."""
        series = self.series(key)
        if not series.steps:
            raise UserError(f"{self.file}: no {key!r} was logged; {remedy}")
        return series


def read_run(path: str | Path) -> Run:
    """Read a run folder, or a `metrics.jsonl` itself.

    A last line that was cut by a crash is left out; a broken line elsewhere is an error.
    """
    path = Path(path)
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a run's folder, which holds {METRICS_FILE}")
    lines = []
    texts = file.read_text().splitlines()
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            if number == len(texts):
                continue
            raise UserError(f"{file}, line {number}: not JSON; the file is damaged") from None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise UserError(f"{file}, line {number}: not an object with a whole-numbered 'step'")
        lines.append(line)
    if not lines:
        raise UserError(f"{file}: the run logged nothing yet")
    return Run(name=file.resolve().parent.name, file=file, lines=lines)


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Several runs, each with a name of its own: folders are told apart by their parents' names."""
    runs = [read_run(path) for path in paths]
    if len({run.file.resolve() for run in runs}) < len(runs):
        raise UserError("the same run is given twice")
    return [
        Run(unique, run.file, run.lines)
        for unique, run in zip(_unique_names([run.file.resolve().parent for run in runs]), runs, strict=True)
    ]


def _unique_names(folders: list[Path]) -> list[str]:
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names) or depth > 20:
            return names
        depth += 1


def short_tokens(number: float) -> str:
    """A number of tokens in short: 57 B, 2.62 M, 492 k."""
    for size, suffix in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"
