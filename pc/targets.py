"""Which weights of a model get PC: those that `PCConfig.blocks` names, and how those of known classes are split."""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from pc.blocks import BLOCK_GROUPS, BLOCK_SUFFIXES, block_of, matches
from pc.config import MatrixSplit, PCConfig
from pc.errors import UserError
from pc.model_classes import splits_of_module
from pc.splits import split_of
from pc.weight import Weight

_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")


def clean_name(name: str) -> str:
    """A module or parameter name without the parts that torch.compile and activation checkpointing insert."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


class LeftOut(NamedTuple):
    """A weight of two dimensions or more that gets no PC."""

    shape: list[int]
    is_known: bool
    """whether it is known how it is split, or that it is none of the blocks"""
    is_linear: bool
    """whether it is that of a linear layer, which a pattern may name"""


def find(model: nn.Module, config: PCConfig) -> tuple[dict[str, Weight], dict[str, LeftOut]]:
    """The weights that `config` names, not marked yet, and all others, by their parameters' full names.

    Raises:
        UserError: `model` or `config` has another type; the model has PC already or is wrapped; a weight is matched twice,
            it is not known how it is split, or the split does not fit.
    """
    if not isinstance(config, PCConfig):
        raise UserError(
            f"pc.attach takes a pc.PCConfig, not a {type(config).__name__}; write pc.PCConfig(level=4, blocks=...)"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"pc.attach takes a torch.nn.Module, not a {type(model).__name__}")
    for module in model.modules():
        if hasattr(module, "pc_weights"):
            raise UserError("the model already has PC; call pc.attach only once, or pc.detach first")
        if hasattr(module, "no_sync") or hasattr(module, "unshard"):
            raise UserError("the model is already wrapped in DDP or FSDP; call pc.attach first")
    targets: dict[str, Weight] = {}
    others: dict[str, LeftOut] = {}
    modules = {clean_name(name): module for name, module in model.named_modules()}
    splits = all_splits(config, modules)
    for module_name, module in modules.items():
        for key in _computed_weights(module):
            if entry := _entry_of(config, block_of(module_name) or "", module_name, _join(module_name, key)):
                raise UserError(
                    f"pc.blocks: {entry!r} matches {module_name}, whose {key} is computed from other parameters (torch's "
                    "parametrize, prune, spectral_norm or weight_norm): undo that first, or leave it out"
                )
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            full_name = _join(module_name, key)
            is_known, split = full_name in splits, splits.get(full_name)
            is_linear = isinstance(module, nn.Linear) and key == "weight"
            if not is_known and is_linear:
                split = MatrixSplit()  # one matrix: a pattern may name any linear layer
            if split is not None:
                blocks = split.blocks
            else:  # known to be none of the blocks; or unknown, and then an entry that matches its name raises below
                blocks = () if is_known else ("",)
            entries = [_entry_of(config, block, module_name, full_name) for block in blocks]
            if not any(entries):
                others[full_name] = LeftOut([*parameter.shape], is_known, is_linear and split is not None)
                continue
            if split is None:
                raise UserError(
                    f"pc.blocks: {entries[0]!r} matches {full_name} of {type(module).__name__}, which is not known to be "
                    f"matrices; add {_splits_to_add([full_name])}"
                )
            head_dims = [split.head_dim or _head_dim(config, block, module_name, modules) for block in split.blocks]
            configs = [config.for_block(entry) if entry else None for entry in entries]
            found = split_of(full_name, parameter.shape, split, configs, head_dims)
            name = module_name if key == "weight" and module_name else full_name
            targets[full_name] = Weight(name, module, key, found)
    return targets, others


def _computed_weights(module: nn.Module) -> list[str]:
    """Names of weights that torch.nn.utils computes from other parameters, such as `weight` from `weight_orig` and a mask."""
    own = [*module._parameters]
    hidden = [key[: -len(end)] for key in own for end in ("_orig", "_g") if key.endswith(end)]
    return [*getattr(module, "parametrizations", ()), *(key for key in hidden if key not in own)]


def all_splits(config: PCConfig, modules: dict[str, nn.Module]) -> dict[str, MatrixSplit | None]:
    """How weights are split, by full names: as the config says, else by the class of the module, else as a plain linear
    layer of a known name. None: known to be none of the blocks; a weight that is not known has no entry."""
    splits: dict[str, MatrixSplit | None] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and (block := block_of(name)):
            splits[_join(name, "weight")] = MatrixSplit((block,))
    for name, module in modules.items():
        splits |= {_join(name, key): split for key, split in splits_of_module(module).items()}
    parameters = [_join(name, key) for name, m in modules.items() for key, _ in m.named_parameters(recurse=False)]
    for pattern, split in reversed([*(config.splits or {}).items()]):  # the first that matches counts
        splits |= {parameter: split for parameter in parameters if _is_named(pattern, parameter)}
    return splits


def require_complete(config: PCConfig, targets: dict[str, Weight], others: dict[str, LeftOut]) -> None:
    """Raise a `UserError` if an entry of `blocks` or `splits` finds no weight.

    Also if an entry of `blocks`, such as ffn, finds some weights of an MLP while another one there is not known, because
    that one could belong to ffn too.
    """
    for pattern in config.splits or {}:
        if not any(_is_named(pattern, parameter) for parameter in [*targets, *others]):
            raise UserError(f"pc.splits: {pattern!r} matches no weight of the model")
    for entry in config.blocks:
        found = [parameter for parameter, target in targets.items() if entry in target.entries]
        if not found:
            # known layers are proposed only for a pattern, which may be misspelt: "o" would have found those it names
            patterns = _patterns(config, targets, others, with_known=not _is_word(entry))
            raise UserError(
                f"pc.blocks: {entry!r} matches no weight of the model; "
                + (f"name layers: {patterns}, or those of them that should have PC; " if patterns else "")
                + "see print(pc.describe(model, config))"
            )
        if not _is_word(entry):
            continue  # a pattern finds what it says
        modules = {parameter.removesuffix(f".{targets[parameter].attribute}") for parameter in found}
        beside = tuple(f"{_part_of_layer(name)}." for name in modules if "." in name)
        unknown = {wildcard_layers(parameter) for parameter, other in others.items() if not other.is_known}
        missed = sorted(name for name in unknown if name.startswith(beside))
        if missed:
            raise UserError(
                f"pc.blocks: {entry!r} finds weights beside {', '.join(missed)}, which may belong to it too; add "
                + _splits_to_add(missed)
            )


def _is_named(pattern: str, parameter: str) -> bool:
    """Whether a pattern matches the full name of a parameter; for "weight", that of its module will do."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in (parameter, parameter.removesuffix(".weight")))


def _entry_of(config: PCConfig, block: str, module_name: str, full_name: str) -> str | None:
    """The entry of `blocks` that matches a part."""
    names = (module_name, full_name)
    entries = [entry for entry in config.blocks if any(matches(entry, name, block) for name in names)]
    if len(entries) > 1:
        raise UserError(f"pc.blocks: {entries[1]!r} matches {module_name}, which an earlier entry matches too")
    return entries[0] if entries else None


def _head_dim(config: PCConfig, block: str, name: str, modules: dict[str, nn.Module]) -> int:
    """Rows of one head, from the attention module around the layer; 0 if the block is not split into heads."""
    if block not in config.heads:
        return 0
    path = name
    while path:
        for key in _HEAD_DIMS:
            if isinstance(value := getattr(modules[path], key, None), int):
                return value
        path = path.rpartition(".")[0]
    raise UserError(f"pc.heads: no module around {name} has a head_dim; give its split in PCConfig.splits")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def counted(lines: Iterable[str]) -> list[str]:
    """Each distinct line once, with its count."""
    return [f"{count} x {line}" for line, count in Counter(lines).items()]


def wildcard_layers(name: str) -> str:
    """A name with * for the number of the layer: "layers.*.mlp" for "layers.0.mlp"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def _part_of_layer(name: str) -> str:
    """The part of its layer that a module is in: "layers.*.mlp" for "layers.0.mlp.shared.up_proj"."""
    around = wildcard_layers(name.rpartition(".")[0])
    layer = re.match(r"(.*\.)?\*\.[^.]+", around)
    return layer[0] if layer else around


def _is_word(entry: str) -> bool:
    """Whether an entry of `blocks` is the name of a block or a group, not a pattern."""
    return entry in BLOCK_SUFFIXES or entry in BLOCK_GROUPS


def _patterns(
    config: PCConfig, targets: dict[str, Weight], others: dict[str, LeftOut], with_known: bool = False
) -> str:
    """A proposal, `blocks=(...)`: the entries that find weights, then patterns for the linear layers in numbered layers that
    no entry finds; "" if there are no such layers.

    Args:
        with_known: whether it names known layers too.
    """
    left = [name for name, other in others.items() if other.is_linear and (with_known or not other.is_known)]
    names = dict.fromkeys(wildcard_layers(parameter).removesuffix(".weight") for parameter in left)
    if not (proposed := [name for name in names if "*." in name]):
        return ""
    found = {entry for target in targets.values() for entry in target.entries}
    quoted = [f'"{entry}"' for entry in (*(entry for entry in config.blocks if entry in found), *proposed)]
    return f"blocks=({', '.join(quoted)}{',' * (len(quoted) == 1)})"


def _splits_to_add(names: Iterable[str], between: str = " ") -> str:
    """An argument of `PCConfig` for these weights, with "?" where only the user knows."""
    entries = f",{between}".join(f'"{wildcard_layers(name)}": pc.MatrixSplit(("?",))' for name in names)
    return (
        f'splits={{{entries}}}, with the names of the parts, in the order of their rows, in place of "?", '
        "or None in place of a MatrixSplit for a weight that is none of the blocks"
    )


def describe(model: nn.Module, config: PCConfig = PCConfig()) -> str:
    """A text to print: which weights get PC, as which matrices, and which are left out, one line for each kind. Then how
    to give PC to unknown weights in numbered layers: patterns, and `PCConfig.splits`.

    Args:
        model: before `attach`; also on the meta device.
        config: whose `blocks` and `splits` to try.
    """
    targets, others = find(model, config)
    lines = []
    for parameter, target in targets.items():
        shape = [*getattr(target.module, target.attribute).shape]
        lines.append(f"{wildcard_layers(parameter)} {shape}: {target.split.describe()}")
    for parameter, other in others.items():
        lines.append(f"left out: {wildcard_layers(parameter)} {other.shape}{'' if other.is_known else ', not known'}")
    text = counted(lines)
    if patterns := _patterns(config, targets, others):
        text.append(f"To give PC to layers that are not known, each as one matrix, name them: {patterns}")
    unknown = dict.fromkeys(wildcard_layers(parameter) for parameter, other in others.items() if not other.is_known)
    if numbered := [name for name in unknown if "*" in name]:
        text += ["If one of those not known is a block, add", _splits_to_add(numbered, between="\n        ")]
    return "\n".join(text)
