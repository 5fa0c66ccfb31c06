"""In which settings runs differ, and whether these forbid a comparison: what a comparison of losses has to say first."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pc.blocks import BLOCK_GROUPS
from pc.errors import UserError
from pc_recipe.config import Config, load_config, read_config, run_key
from pc_recipe.config.model_sizes import sizes_of
from pc_recipe.files.run_folder import list_configs, read_environment, read_parts
from pc_recipe.files.run_log import RunLog
from pc_recipe.runs.comparable import sequences_of


def blocks(config: Config | None) -> str:
    """The single blocks whose condition numbers a run logs together: those of its `pc.blocks`, also for a baseline."""
    if config is None:
        return "its own pc.blocks"
    named = {block for entry in config.pc.blocks for block in BLOCK_GROUPS.get(entry, (entry,))}
    known = [*BLOCK_GROUPS["qk"], "v", "o", *BLOCK_GROUPS["ffn"]]
    return ", ".join([block for block in known if block in named] + sorted(named.difference(known)))


def why_apart(first: Config | None, other: Config | None) -> str:
    """Why the losses of two configurations are not compared; "" if they are, or if one is unknown."""
    if first is None or other is None:
        return ""
    if sizes_of(first.model) != sizes_of(other.model):  # whatever their PC
        return "another model"
    return "" if sequences_of(first) == sequences_of(other) else "validated on other sequences"


def differences(runs: Sequence[RunLog]) -> list[str]:
    """Such as "optimizer.lr: 0.001 in baseline, 0.002 in pc" for each setting that decides a result; settings that changed
    within a run; and other code."""
    folders = {run.name: run.file.parent for run in runs}
    known = {name: config for name, folder in folders.items() if (config := read_config(folder)) is not None}
    ranks = {run.name: read_environment(run.file.parent).get("world_size") for run in runs}
    keys = {name: run_key.settings_key(config, ranks[name]) for name, config in known.items()}
    with_pc = {name: key for name, key in keys.items() if key.get("pc.enable")}
    differing = {key: keys for key in _differing(keys) if key == "pc.enable" or not key.startswith("pc.")}
    # a baseline has none of the others
    differing |= {key: with_pc for key in _differing(with_pc) if key.startswith("pc.")}
    values = {name: run_key.all_values(config) for name, config in known.items()}
    for name, shown in values.items():  # -1 depends on the number of ranks
        shown[run_key.BATCH] = keys[name].get(run_key.BATCH, shown[run_key.BATCH])
    lines = [
        f"{key}: {', '.join(f'{values[name].get(key)} in {name}' for name in names)}"
        for key, names in differing.items()
    ]
    lines += [
        f"{key}: changed within {name}" for name, config in known.items() for key in _changed(folders[name], config)
    ]
    parts = [(part, run.name) for run in runs for part in read_parts(run.file.parent) if "code" in part]
    if any(part["code"] != parts[0][0]["code"] for part, _ in parts):
        commits = ", ".join(f"{part.get('commit') or 'unknown'} in {name}" for part, name in parts)
        lines.append(f"code, torch or TorchTitan: commits {commits}")
    unknown = [run.name for run in runs if run.name not in known]
    return lines + ([f"unknown settings: no configuration of {', '.join(unknown)} can be read"] if unknown else [])


def _changed(run: Path, config: Config) -> list[str]:
    """The keys in which earlier parts of a run, as far as they can be read, differ from its last configuration."""
    keys = {"last": run_key.settings_key(config)}
    for file in list_configs(run)[1:]:
        with suppress(UserError):
            keys[file.name] = run_key.settings_key(load_config(file))
    return _differing(keys)


def _differing(keys: dict[str, dict[str, Any]]) -> list[str]:
    """The keys in which any of them differs from the first."""
    first, *others = keys.values() or [{}]
    return [*dict.fromkeys(key for other in others for key in run_key.differing_keys(first, other))]
