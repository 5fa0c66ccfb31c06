"""`PCConfig` and `MatrixSplit`: which weights PC applies to, and how. Training, scoring and plots share it. Needs no
torch."""

import warnings
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, get_args

from pc.blocks import BLOCK_GROUPS, BLOCK_SUFFIXES
from pc.errors import UserError
from pc.maps import LEVEL_NAMES, TOLERANCE_AT_ONE, Coefficients, Map, evaluate, name_of, resolve

Level = int | str | Coefficients
ComputeDtype = Literal["float32", "tf32"]


def _key(default: Any, help: str) -> Any:
    """A field with its description; the recipe's TOML section and its `--help` are made of both."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class MatrixSplit:
    """How a stored weight is split into matrices: its parts, in the order of their rows."""

    blocks: tuple[str, ...] = ("",)
    """Name of each part: q, k, v, o, gate, up, down, or any other word for rows that never get PC."""

    sizes: tuple[int, ...] = ()
    """Relative number of rows of each part; empty: all equal."""

    repeats: int = 1
    """How often the sequence of parts is repeated. GPT-NeoX stores q, k and v of one head, then of the next: repeats is
    the number of heads."""

    head_dim: int = 0
    """Rows of one matrix, if each part is split into heads."""

    transposed: bool = False
    """Stored as [inputs, outputs]."""

    def __post_init__(self) -> None:
        if "?" in self.blocks:  # as `pc.describe` prints it for a weight that it does not know
            raise UserError('pc.MatrixSplit: put the names of the parts, such as ("gate", "up"), in place of "?"')


@dataclass(frozen=True)
class PCConfig:
    """How weights are preconditioned (paper, algorithm 1).

    Raises:
        UserError: an invalid value; the message names the field and valid values.
    """

    level: Level | Mapping[str, Level] = _key(
        4,
        f"Strength of PC: {LEVEL_NAMES}; or your own coefficients of p from degree 0 up, such as [2.083, "
        "-1.643, 0.560]; or a table with one of these for each entry of blocks.",
    )
    blocks: tuple[str, ...] = _key(
        ("o", "ffn"),
        f"Weights to precondition: {', '.join(BLOCK_SUFFIXES)}, the groups {' and '.join(BLOCK_GROUPS)}, or patterns of "
        "module or parameter names such as model.layers.*.mlp.fc1.",
    )
    heads: tuple[Literal["q", "k", "v"], ...] = _key((), "Blocks whose weights are one matrix for each attention head.")
    splits: Mapping[str, MatrixSplit | None] | None = _key(
        None,
        "How weights other than those of plain linear layers are split into matrices (pc.MatrixSplit), by patterns of "
        "parameter names. An entry of value None leaves a weight out. Classes in pc.model_classes.KNOWN need no entry.",
    )
    power_iterations: int = _key(10, "Power iterations per optimizer step (q in algorithm 3).")
    norm_recovery: bool = _key(True, "Multiply by the norm that W was divided by, to restore it.")
    learnable_gamma: bool = _key(True, "Multiply by one learnable scalar per matrix, initialised to 1.")
    compute_dtype: ComputeDtype = _key(
        "float32",
        "Precision of the polynomial's matmuls. float32: no lower than the weight's own, float32 or float64.",
    )

    def __post_init__(self) -> None:
        for key in ("blocks", "heads"):
            names: Any = getattr(self, key)
            if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
                raise UserError(f"pc.{key} must be names{' or patterns' * (key == 'blocks')}, not {names!r}")
            object.__setattr__(self, key, (names,) if isinstance(names, str) else tuple(names))
        if not self.blocks:
            raise UserError("pc.blocks is empty; name at least one, for example o or ffn")
        for name in self.blocks:
            if name not in BLOCK_SUFFIXES and name not in BLOCK_GROUPS and "." not in name and "*" not in name:
                known = " ".join([*BLOCK_SUFFIXES, *BLOCK_GROUPS])
                raise UserError(
                    f"pc.blocks: {name!r} is not a block; use {known}, or a pattern of full names, such as *{name}"
                )
        if unknown := set(self.heads) - {"q", "k", "v"}:
            raise UserError(f"pc.heads: {sorted(unknown)[0]!r} is not one of q, k, v")
        # by name, so that configs with the same maps are equal
        levels = {block: name_of(map) for block, map in self.maps.items()}
        object.__setattr__(self, "level", levels if isinstance(self.level, Mapping) else levels[self.blocks[0]])
        for coefficients in set(self.maps.values()):
            if abs((at_one := evaluate(coefficients, 1.0)) - 1.0) > TOLERANCE_AT_ONE:
                warnings.warn(
                    f"pc.level: coefficients {list(coefficients)} have g(1) = {at_one:.4g}, so PC multiplies the largest "
                    "singular value of W by that factor; the published maps have g(1) = 1",
                    stacklevel=3,  # the caller of PCConfig(...), behind its __init__
                )
        for pattern, split in (self.splits or {}).items():
            if not isinstance(split, MatrixSplit | None):
                raise UserError(
                    f"pc.splits: {pattern!r} must be a pc.MatrixSplit or None, which only Python can give, not {split!r}"
                )
        if not isinstance(self.power_iterations, Integral) or self.power_iterations < 1:
            raise UserError(f"pc.power_iterations must be a whole number of at least 1, not {self.power_iterations!r}")
        for key in ("norm_recovery", "learnable_gamma"):
            if isinstance(getattr(self, key), str):  # "false" counts as true
                raise UserError(f"pc.{key} must be True or False, not {getattr(self, key)!r}")
        if self.compute_dtype not in (choices := get_args(ComputeDtype)):
            raise UserError(f"pc.compute_dtype must be one of {', '.join(choices)}, got {self.compute_dtype!r}")

    @cached_property
    def maps(self) -> dict[str, Map]:
        """The map g of each entry of `blocks`, found once."""
        levels: Mapping[str, Any] = (
            self.level if isinstance(self.level, Mapping) else dict.fromkeys(self.blocks, self.level)
        )
        if set(levels) != set(self.blocks):
            raise UserError(
                f"pc.level names {sorted(levels)} but pc.blocks names {sorted(self.blocks)}; give one level for each"
            )
        return {block: resolve(level) for block, level in levels.items()}

    @property
    def map(self) -> Map:
        """The map g, if the config has one level (see `for_block`)."""
        return self.maps[self.blocks[0]]

    def for_block(self, block: str) -> "PCConfig":
        """The configuration of one entry of `blocks`, with that entry's level; heads and splits are resolved by then."""
        level = self.level[block] if isinstance(self.level, Mapping) else self.level
        one = copy(self)  # without __post_init__, which would repeat its checks and warnings
        vars(one).update(level=level, blocks=(block,), heads=(), splits=None)
        return one
