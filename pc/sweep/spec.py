"""Sweep files: base configs, variants, axes and seeds in a TOML; their product is the list of runs.

configs = ["../271m_adamw_baseline.toml"]     # relative to the sweep's file
seeds = [0, 1]                                # optional

[axes]                                        # quoted, because the dot is part of the name
"optimizer.lr" = { first = 3e-4, last = 3.394e-3 }        # geometric, factor = sqrt(2)
"pc.level" = [1, 2, 3, 4]

[variants.long]                               # optional: settings that go together, and their name
"training.steps" = 2000
"lr_scheduler.warmup_steps" = 20
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pc.common.files import write_atomically
from pc.errors import UserError
from pc.launch.run import Run
from pc.settings import load_config, sections
from pc.settings.chain import resolve
from pc.settings.identity import everything
from pc.settings.sections import Interval, Section, Text, sub

Positive = Annotated[float, Field(gt=0)]


class Selection(Section):
    """How `select` chooses the best run."""

    metric: str = sections.key(
        "validation_loss", "Key of metrics.jsonl; the run with the lowest final value is chosen."
    )
    spikes_allowed: Interval = sections.key(0, "A run with more spikes is unstable and cannot be chosen.")


class Grid(Section):
    """A geometric grid of an axis."""

    first: Positive
    last: Positive
    factor: Annotated[float, Field(ge=1.01)] = sections.key(math.sqrt(2), "Between neighbours.")


class SweepConfig(Section):
    """The keys of a sweep's TOML; `parent` works as in any config."""

    description: str = sections.key("", "One line of description.")
    configs: list[Text] = sections.key([], "Training configs to vary, relative to the sweep's file.")
    axes: dict[str, Annotated[list, Field(min_length=1)] | Grid] = sections.key(
        {}, '"section.key" = [values], or a grid.'
    )
    variants: dict[str, dict[str, Any]] = sections.key(
        {}, 'Named tables of "section.key" = value: settings that go together.'
    )
    seeds: list[int] = sections.key(
        [], "Seeds of initial weights and data order, a run each; empty: the config's own seed."
    )
    folder: Text = sections.key("", "Folder of runs and results; empty: outputs/sweeps/<name of the sweep's file>.")
    select: Selection = sub(Selection)


@dataclass(frozen=True)
class Sweep:
    """A sweep's file with its list of runs."""

    path: Path
    folder: Path
    runs: list[Run]
    axes: dict[str, list]
    """{key that differs between runs: its values}"""
    select: Selection


def load(path: str | Path) -> Sweep:
    """Read a sweep and check every run's config."""
    path = Path(path)
    config = resolve(path, [], SweepConfig)
    try:
        return _sweep(path, config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _sweep(path: Path, config: SweepConfig) -> Sweep:
    folder = Path(config.folder or Path("outputs/sweeps") / path.stem)
    files = {name: _shortest(path.parent / name) for name in config.configs}
    axes = {
        key.replace("-", "_"): axis if isinstance(axis, list) else _points(key.replace("-", "_"), axis, files.values())
        for key, axis in config.axes.items()
    }
    varied = list(dict.fromkeys([*(key for values in config.variants.values() for key in values), *axes]))
    for key in ("job.dump_folder", *(("debug.seed", "data.seed") if config.seeds else ())):
        if key in varied:
            raise UserError(f"{key} is set by the sweep itself, for folder and seeds; remove one of them")
    runs = []
    for name, file in files.items():
        for parts, settings in _combinations(config.variants, axes):
            stem = [Path(name).stem] if len(files) > 1 or not parts else []
            setting = "/".join([*stem, *(["_".join(parts)] if parts else [])])
            for seed in config.seeds or [None]:
                run_name = setting if seed is None else f"{setting}/seed-{seed}"
                words = [_word(key, value) for key, value in settings.items()]
                words += [] if seed is None else [f"--debug.seed={seed}", f"--data.seed={seed}"]
                run = Run(run_name, file, (*words, f"--job.dump_folder={folder / run_name}"), folder / run_name, seed)
                resolved = everything(run.resolved)  # refuses what is wrong
                run.settings.update({key: resolved[key] for key in varied})
                runs.append(run)
    if len({run.name for run in runs}) < len(runs):
        raise UserError("two runs have the same name; is a value, a seed or a config listed twice?")
    return Sweep(
        path, folder, runs, {key: _distinct(run.settings[key] for run in runs) for key in varied}, config.select
    )


def _combinations(variants: dict[str, dict], axes: dict[str, list]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """(parts of a run's name, {key: value}) of each variant at each point of the axes."""
    for variant, values in (variants or {"": {}}).items():
        for point in itertools.product(*axes.values()):
            chosen = dict(zip(axes, point, strict=True))
            parts = [variant] if variant else []
            parts += [f"{key.rpartition('.')[2]}-{_text(value)}" for key, value in chosen.items()]
            yield parts, values | chosen


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []  # no set, because a list is no key
    for value in values:
        if value not in found:
            found.append(value)
    return found


def begin(sweep: Sweep) -> Path:
    """Write the run list from which the jobs of an array read their run.

    A run keeps its position, because waiting jobs identify their run by it; added runs come at the end.
    """
    destination = sweep.folder / "runs.json"
    before = json.loads(destination.read_text())["runs"] if destination.exists() else []
    now = {run.name: {"name": run.name, "config": run.config, "overrides": list(run.overrides)} for run in sweep.runs}
    listed = [now.pop(entry["name"], entry) for entry in before] + list(now.values())
    write_atomically(destination, json.dumps({"runs": listed}, indent=1) + "\n")
    return destination


def label(settings: dict[str, Any]) -> str:
    """Settings as a plot label: "pc on, lr 0.003, blocks o+ffn"."""
    words = []
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        words.append(f"{section if name == 'enable' else name} {value_label(value)}")
    return ", ".join(words)


def value_label(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "+".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _points(key: str, axis: Grid, files: Iterable[str]) -> list[float]:
    """A grid's values. The configs' own is on a published grid up to rounding: that exactly, so that this run is theirs."""
    own = _distinct(everything(load_config(file)).get(key) for file in files)
    one = own[0] if len(own) == 1 and isinstance(own[0], float) and own[0] else math.inf
    grid = geometric_grid(axis.first, axis.last, axis.factor, key)
    return [one if abs(value / one - 1) < ROUNDING else value for value in grid]


ROUNDING = 5e-4
"""Relative rounding error of four significant digits."""


def geometric_grid(first: float, last: float, factor: float, key: str) -> list[float]:
    """first, first*factor, ... up to last, evenly spaced and rounded to four significant digits.

    `last` must be on the grid to within half a percent, because published ends are rounded.
    """
    count = max(0, round(math.log(last / first) / math.log(factor)))
    if abs(first * factor**count / last - 1) > 5e-3:
        fits = f"{first * factor**count:.4g} or {first * factor ** (count + 1):.4g}"
        raise UserError(f"axes.{key}.last = {last} is not on the grid; the nearest points are {fits}")
    return [float(f"{first * (last / first) ** (step / max(1, count)):.4g}") for step in range(count + 1)]


def _shortest(path: Path) -> str:
    """Path relative to the working directory if it is inside, so that it stays valid in a moved checkout."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path.resolve())


def _word(key: str, value: Any) -> str:
    """`--section.key=value` as `toml.parse_overrides` reads it; JSON's scalars and lists are TOML's."""
    if isinstance(value, str):
        return f"--{key}={value}"
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(name)} = {json.dumps(item)}" for name, item in value.items())
        return f"--{key}={{{pairs}}}"
    return f"--{key}={json.dumps(value)}"


def _text(value: Any) -> str:
    """A value as part of a folder's name."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "+".join(_text(item) for item in value) or "none"
    if isinstance(value, dict):
        return "+".join(f"{name}={_text(item)}" for name, item in value.items())
    return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in str(value))
