"""All matrices of a model by layer and block, whether or not they get PC."""

import re
from dataclasses import dataclass

from torch import Tensor, nn

from pc.blocks import BLOCK_SUFFIXES
from pc.config import MatrixSplit, PCConfig
from pc.splits import WeightSplit, split_of
from pc.targets import all_splits, clean_name
from pc.weight import ADDED

_ALL_PARTS = PCConfig()  # a split returns only the parts that have a config, so each gets one


@dataclass(frozen=True)
class Stored:
    """A stored weight that is one matrix or several."""

    name: str
    """the parameter's"""
    layer: str
    """its numbered layer, such as "model.layers.3"; "" outside of layers"""
    blocks: tuple[str, ...]
    """the blocks of its parts: q, k, v, o, gate, up, down where known, else the name of the module or part"""
    split: WeightSplit

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """For each part: number of matrices, rows, columns."""
        stack = self.split.stack[0] if self.split.stack else 1
        return [(stack * part.count, part.rows, self.split.columns) for part in self.split.parts]

    def cut(self, weight: Tensor) -> list[tuple[str, Tensor]]:
        """(block, matrices [count, rows, columns]) of each part."""
        return list(zip(self.blocks, self.split.split_weight(weight[None]), strict=True))


def stored_weights(model: nn.Module) -> tuple[list[Stored], list[str]]:
    """The weights of a model that are matrices, by layer, and a line about each other parameter of two dimensions or more.

    A weight is one matrix unless it is known to be several. Biases, and tensors that PC adds to a weight, get no line.

    Raises:
        UserError: a split of a known class does not fit its weight.
    """
    modules = {clean_name(name): module for name, module in model.named_modules()}
    splits = all_splits(PCConfig(), modules)
    names = {clean_name(name) for name, _ in model.named_parameters()}
    found, others = [], []
    for full_name, parameter in model.named_parameters():
        name = clean_name(full_name)
        base, _, added = name.rpartition("_")
        is_of_pc = added in ADDED and {base, f"{base}_orig"} <= names
        if parameter.ndim < 2 or is_of_pc or name.endswith("bias"):
            continue
        split = splits.get(name) or MatrixSplit((_label(name),))
        reason = _why_not(name, parameter, is_known=splits.get(name) is not None)
        if reason:
            others.append(f"{name} {[*parameter.shape]}: {reason}")
            continue
        whole = split_of(name, parameter.shape, split, [_ALL_PARTS] * len(split.blocks), [0] * len(split.blocks))
        found.append(Stored(name, _layer(name), split.blocks, whole))
    return sorted(found, key=lambda stored: _natural(stored.layer)), others


def _why_not(name: str, parameter: Tensor, is_known: bool) -> str:
    """Why a parameter is no matrix that can be measured; "" if it is one."""
    if not parameter.numel():
        return "empty"
    if re.search(r"\bweight_(orig|mask|v|g)$|\bparametrizations\.", name):
        return "the weight is computed from it, by torch's prune, spectral_norm, weight_norm or parametrize"
    if parameter.is_complex() or not parameter.is_floating_point():
        return f"{parameter.dtype} is no real floating-point type".replace("torch.", "")
    if parameter.dtype.itemsize < 2:
        return "8-bit, with unknown scales"
    if parameter.ndim > 3 or (parameter.ndim == 3 and not is_known and "expert" not in name):
        return f"has {parameter.ndim} dimensions, and is not known to be matrices"
    if min(parameter.shape[-2:]) == 1:
        return "a vector"
    return ""


def _layer(name: str) -> str:
    layer = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return layer[0] if layer else ""


def _natural(layer: str) -> list[tuple[str, int]]:
    """A key by which layer 10 comes after layer 2: words between numbers, each with the number after it."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", layer)]


def _label(name: str) -> str:
    """A name for a weight that is none of the blocks: "router" for "layers.0.router.weight". It is never a block's name:
    a router named gate becomes "mlp.gate"."""
    words = [word for word in name.removesuffix(".weight").split(".") if not word.isdigit()]
    return ".".join(words[-2:] if words[-1:] and words[-1] in BLOCK_SUFFIXES else words[-1:]) or "weight"
