"""What two runs are compared by: dicts of the keys that count (`pc_recipe.config.sections` says what a key decides).

method_key   defines the weights in a checkpoint
weights_key  the method, the model's sizes and the optimizer; a resume must match it
settings_key what decides a run's result, as far as the config says it (`pc_recipe.train.inputs` says the rest)
all_values   everything; all ranks of a run must agree on it

A settings key holds only values that differ from the defaults, so that adding a key later does not change it.
"""

import json
from typing import Any

from pc.blocks import BLOCK_GROUPS
from pc_recipe.config.inheritance import validated
from pc_recipe.config.model_sizes import sizes_of
from pc_recipe.config.pc_section import PC
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.config.schema import Config
from pc_recipe.config.sections import METHOD, RESULT, keys_of

BATCH = "training.global_batch_size"
START = "checkpoint.initial_load_path"
STARTS = (
    START, "checkpoint.initial_load_model_only", "checkpoint.initial_load_in_hf",
    "checkpoint.exclude_from_loading", "debug.seed", "model.init_std", "model.init_factors", "pc.start",
)  # fmt: skip
"""keys that only a new run uses"""


def all_values(config: Config) -> dict[str, Any]:
    """{"section.key": value}"""
    return {name: value for name, _, value, _ in keys_of(config)}


def list_unapplied(config: Config, first: dict[str, Any]) -> list[str]:
    """Settings that a resume cannot apply, where they differ from `first`, the config.toml with which the run began."""
    now, defaults = all_values(config), all_values(Config())
    began = {name: first.get(name.split(".")[0], {}).get(name.split(".")[1], defaults[name]) for name in STARTS}
    return [f"{name} = {now[name]!r}" for name in STARTS if now[name] != began[name]]


def as_begun(config: Config, first: dict[str, Any]) -> Config:
    """`config` with the keys that a resume cannot apply as they are in `first`: the record of what was trained."""
    values = config.model_dump(exclude_unset=True)
    for section, _, name in (name.partition(".") for name in STARTS):
        values.get(section, {}).pop(name, None)
        if name in first.get(section, {}):
            values.setdefault(section, {})[name] = first[section][name]
    begun = validated(values, Config, "the config.toml with which the run began")
    begun._origin = config._origin
    return begun


def method_key(pc: PC) -> dict[str, Any]:
    """What defines PC(W), with single blocks and their maps, independent of groups, order and the levels' names."""
    if not pc.enable:
        return {"enable": False}
    levels = pc.pc_config.levels
    single = {block: levels[entry].map for entry in levels for block in BLOCK_GROUPS.get(entry, (entry,))}
    # Keep one level if all blocks share it, so that a change of blocks is not reported as a change of level too.
    level = single if len(set(single.values())) > 1 else next(iter(single.values()))
    settings = {name: value for name, decides, value, _ in keys_of(pc) if decides == METHOD}
    return (
        {"enable": True} | settings | {"blocks": sorted(single), "level": level}
    )  # differences are named in this order


def weights_key(config: Config) -> dict[str, Any]:
    """What shapes and defines the weights in a run's checkpoints, and the states of their optimizers."""
    sizes = {f"model.{name}": size for name, size in sizes_of(config.model).items()}
    method = {f"pc.{name}": value for name, value in method_key(config.pc).items()}
    return sizes | method | {"optimizer.name": config.optimizer.name}


def settings_key(config: Config, world_size: int | None = None) -> dict[str, Any]:
    """What a config says of a run's result: settings and the sequences of a step.

    Args:
        world_size: number of processes, if it is known; without it and `training.global_batch_size`, the key lacks
            the sequences of a step.
    """
    off = tuple(f"{name}." for name, section in config if not getattr(section, "enable", True))
    values = {
        name: value
        for name, decides, value, field in keys_of(config)
        if decides == RESULT and value != field.default and not name.startswith(off)
    }
    values |= {f"pc.{key}": value for key, value in method_key(config.pc).items()}
    if config.training.global_batch_size == -1 and world_size is not None:
        values[BATCH] = RankBatches.of(config, world_size).sequences
    return json.loads(json.dumps(values))


def differing_keys(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The keys in which two methods, or two results, differ. Batch and checksums do not count
    where only one has them. Nor do data folders with equal content, except in a mixture, where the key has weights too."""
    ignored = {key for key in one.keys() ^ other.keys() if key == BATCH or key.startswith("content of ")}
    for key in ("data.path", "data.validation_path"):
        content, folders = f"content of {key}", (one.get(key), other.get(key))
        if content in one and one[content] == other.get(content) and not any(isinstance(f, dict) for f in folders):
            ignored.add(key)
    return [key for key in one | other if one.get(key) != other.get(key) and key not in ignored]
