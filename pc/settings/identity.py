"""When two runs are the same, in three readings of the keys (`pc.settings.sections`): the method, which a checkpoint
must match; the result, which makes runs equal; and everything, on which ranks must agree.

Method and result hold only values that differ from the defaults, so that a key that is added later changes neither.
"""

import json
import os
from pathlib import Path
from typing import Any

from pc.config import BLOCK_GROUPS
from pc.levels import resolve
from pc.settings.layout import Layout
from pc.settings.optimizers import foreign_keys
from pc.settings.schema import PC, Config
from pc.settings.sections import METHOD, RESULT, keys_of

_SWITCHES = {"pc": "enable", "checkpoint": "enable", "validation": "enable", "evaluation": "interval"}
"""{section: the key without which its other keys decide nothing}"""

BATCH = "training.global_batch_size"


def everything(config: Config) -> dict[str, Any]:
    """{"section.key": value}"""
    return {name: value for name, _, value, _ in keys_of(config)}


def method(pc: PC) -> dict[str, Any]:
    """What defines PC(W): {key of [pc]: value}, with "enable" in any case."""
    changed = {name: value for name, decides, value, default in keys_of(pc) if decides == METHOD and value != default}
    return {"enable": True} | changed if pc.enable else {"enable": False}


def whole_method(changed: dict[str, Any]) -> dict[str, Any]:
    """A method with its defaults."""
    defaults = {name: default for name, decides, _, default in keys_of(PC()) if decides == METHOD}
    return defaults | changed if changed["enable"] else changed


def differing_method(saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The keys in which two methods differ; the order of blocks, and how a level is written, do not count."""
    if saved.get("enable") != ours.get("enable"):
        return ["enable"]
    return _differing(_canonical(saved), _canonical(ours)) if ours["enable"] else []


def contents(config: Config) -> dict[str, str]:
    """{key: checksum of the settings that made the data}, for the folders that can be read."""
    found = {}
    for key, folder in (("data.path", config.data.path), ("data.validation_path", _validation_path(config))):
        try:
            manifest = json.loads(Path(folder, "manifest.json").read_text())
            found[f"content of {key}"] = manifest["configuration_sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # reported when the data are opened
    return found


def result(config: Config, world_size: int | None = None, data: dict[str, str] | None = None) -> dict[str, Any]:
    """What decides a run's result: settings, the sequences of a step and the content of its data.

    Args:
        world_size: number of processes, if it is known; without it and `training.global_batch_size` the result has no
            number of sequences.
        data: `contents` when it was trained; None: as they are now.
    """
    off = tuple(f"{section}." for section, switch in _SWITCHES.items() if not getattr(getattr(config, section), switch))
    foreign = {f"optimizer.{key}" for key in foreign_keys(config.optimizer.name)}
    found = {
        name: value
        for name, decides, value, default in keys_of(config)
        if decides == RESULT and value != default and not name.startswith(off) and name not in foreign
    }
    if config.pc.enable:
        found |= {f"pc.{key}": value for key, value in _canonical(method(config.pc)).items()}
    found |= {"data.path": os.path.abspath(config.data.path), "data.validation_path": _validation_path(config)}
    if config.training.global_batch_size == -1 and world_size is not None:
        found[BATCH] = Layout.of(config, world_size).sequences
    return json.loads(json.dumps(found | (contents(config) if data is None else data)))


def differing_result(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The keys in which two results differ; what only one of them knows of batch and data does not count."""
    unknown = {key for key in one.keys() ^ other.keys() if key == BATCH or key.startswith("content of ")}
    return [key for key in _differing(one, other) if key not in unknown]


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]


def _validation_path(config: Config) -> str:
    return os.path.abspath(config.data.validation_path or config.data.path)


def _canonical(changed: dict[str, Any]) -> dict[str, Any]:
    """A whole method with blocks and levels independent of groups, order and names."""
    settings = whole_method(changed)
    level, blocks = settings["level"], settings["blocks"]
    levels = level if isinstance(level, dict) else dict.fromkeys(blocks, level)
    single = {block: resolve(levels[entry]) for entry in blocks for block in BLOCK_GROUPS.get(entry, (entry,))}
    # Keep one level if all blocks share it, so that a change of blocks is not reported as a change of level too.
    distinct = set(single.values())
    return {**settings, "blocks": sorted(single), "level": single if len(distinct) > 1 else distinct.pop()}
