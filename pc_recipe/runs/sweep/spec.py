"""Sweep files: base configs, variants, axes and seeds in a TOML; their product is the list of runs.

configs = ["../271m_adamw_baseline.toml"]     # relative to the sweep's file
seeds = [0, 1]                                # optional

[axes]                                        # quoted, because the dot is part of the name
"optimizer.lr" = [3e-4, 4.243e-4, 6e-4]
"pc.level" = [1, 2, 3, 4]

[variants.plain]                              # optional: settings that go together, and their name; if there are
[variants.long]                               # any, each run has one, so a plain arm needs one too
"training.steps" = 2000
"lr_scheduler.warmup_steps" = 20
"""

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pc.errors import UserError
from pc_recipe.config import sections
from pc_recipe.config.command_line import as_toml
from pc_recipe.config.inheritance import resolve
from pc_recipe.config.run_key import all_values
from pc_recipe.config.sections import Interval, Section, Text
from pc_recipe.runs.run import Run

SWEEPS = Path("outputs/sweeps")
"""Default folder of sweeps."""


def _quoted(table: Any) -> Any:
    """TOML reads `optimizer.lr = 1` as a table `optimizer`. Of the keys of runs, which have a dot, some do have tables."""
    for name, value in table.items() if isinstance(table, dict) else ():
        if "." not in name and isinstance(value, dict):
            raise ValueError(f'should have keys in quotes: "{name}.{next(iter(value), "key")}" = ...')
    return table


_Settings = Annotated[dict[str, Any], BeforeValidator(_quoted)]


class SweepConfig(Section):
    """The keys of a sweep's TOML; `parent` works as in any config."""

    description: str = sections.key("", "One line of description.")
    configs: list[Text] = sections.key([], "Training configs to vary, relative to the sweep's file.")
    axes: Annotated[dict[str, Annotated[list, Field(min_length=1)]], BeforeValidator(_quoted)] = sections.key(
        {}, '"section.key" = [values].'
    )
    variants: dict[str, _Settings] = sections.key(
        {}, 'Named tables of "section.key" = value: settings that go together. If there are any, each run has one.'
    )
    arms: dict[str, _Settings] = sections.key(
        {},
        "Settings that variants of these names start from (train_configs/sweeps/arms.toml); if given, each variant is one.",
    )
    seeds: list[int] = sections.key(
        [], "Seeds of initial weights and data order, a run each; empty: the config's own seed."
    )
    folder: Text = sections.key("", "Folder of runs and results; empty: outputs/sweeps/<name of the sweep's file>.")
    spikes_allowed: Interval = sections.key(0, "A run with more spikes is unstable and cannot be selected.")


@dataclass(frozen=True)
class Sweep:
    """A sweep's file with its list of runs."""

    path: Path
    folder: Path
    runs: list[Run]
    spikes_allowed: int


def load(path: str | Path) -> Sweep:
    """Read a sweep and check every run's config."""
    path = Path(path)
    config = resolve(path, [], SweepConfig)
    try:
        return _sweep(path, config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _sweep(path: Path, config: SweepConfig) -> Sweep:
    if not config.configs:
        raise UserError("configs is empty; name the training configs to vary")
    folder = Path(config.folder or SWEEPS / path.stem)
    varied = list(dict.fromkeys(key for *_, settings in _combinations(config) for key in settings))
    for key in ("job.dump_folder", *(("debug.seed", "data.seed") if config.seeds else ())):
        if key in varied:
            raise UserError(f"{key} is set by the sweep itself, from folder or seeds; remove it from the settings")
    if unfit := [name for name in config.variants if not re.fullmatch(r"\w[\w.+=-]*", name)]:
        raise UserError(f"variants.{unfit[0]!r} names a folder: use letters, digits and . + = - _")
    if config.arms and (unknown := [name for name in config.variants if name not in config.arms]):
        raise UserError(f"variants.{unknown[0]} is no arm; the arms are {', '.join(config.arms)}")
    runs = []
    seeds: list[int | None] = [*config.seeds] or [None]
    for name in config.configs:
        file = _shortest(path.parent / name)
        for variant, parts, settings in _combinations(config):
            stem = [Path(name).stem] if len(config.configs) > 1 or not parts else []
            setting = "/".join([*stem, *(["_".join(parts)] if parts else [])])
            for seed in seeds:
                run_name = setting if seed is None else f"{setting}/seed-{seed}"
                words = [f"--{key}={as_toml(value)}" for key, value in settings.items()]
                words += [] if seed is None else [f"--debug.seed={seed}", f"--data.seed={seed}"]
                words.append(f"--job.dump_folder={folder / run_name}")
                run = Run(run_name, file, tuple(words), folder / run_name, seed, variant=variant)
                resolved = all_values(run.resolved)  # refuses what is wrong
                run.settings.update({key: resolved[key] for key in varied})
                runs.append(run)
    if len({run.name for run in runs}) < len(runs):
        raise UserError("two runs have the same name; is a value, a seed or a config listed twice?")
    return Sweep(path, folder, runs, config.spikes_allowed)


def _combinations(config: SweepConfig) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """(variant, parts of a run's name, {key: value}) of each variant at each point of the axes."""
    for variant, own in (config.variants or {"": {}}).items():
        values = {_key(key): value for key, value in (config.arms.get(variant, {}) | own).items()}
        for key in [_key(key) for key in config.axes if _key(key) in values]:
            table = "variants" if key in map(_key, own) else "arms"
            raise UserError(f"axes.{key} is set by {table}.{variant} too; give it in one of them")
        for point in itertools.product(*config.axes.values()):
            chosen = dict(zip(map(_key, config.axes), point, strict=True))
            parts = [variant] if variant else []
            parts += [f"{key.rpartition('.')[2]}-{_name(value)}" for key, value in chosen.items()]
            yield variant, parts, values | chosen


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
        return "+".join(map(value_label, value)) or "none"
    if isinstance(value, dict):
        return "+".join(f"{name}={value_label(item)}" for name, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _name(value: Any) -> str:
    """A value as part of a folder's name."""
    return str(value).lower() if isinstance(value, bool) else re.sub(r"[^\w.+=-]|_", "-", value_label(value))


def _key(key: str) -> str:
    """A key as the schema spells it; a command line takes - and _."""
    return key.replace("-", "_")


def _shortest(path: Path) -> str:
    """Path relative to the working directory if it is inside, so that it stays valid in a moved checkout."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path.resolve())
