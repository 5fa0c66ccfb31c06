"""`PCConfig` and `MatrixSplit`: which weights PC applies to, and how. Training, scoring and plots share it. Needs no
torch."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, get_args

from pc.blocks import BLOCK_GROUPS, BLOCK_SUFFIXES
from pc.errors import UserError
from pc.maps import LEVEL_NAMES, TOLERANCE_AT_ONE, Coefficients, Level, evaluate, resolve

LevelName = int | str | Coefficients
ComputeDtype = Literal["float32", "tf32", "float16"]


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

    level: LevelName | Mapping[str, LevelName] = _key(
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
        "Precision of the polynomial's matmuls. float32: no lower than the weight's own, float32 or float64. float16: factors "
        "only, which are scaled first; sums, norms and vectors stay in float32.",
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
        names = {block: level.name for block, level in self.levels.items()}
        object.__setattr__(self, "level", names if isinstance(self.level, Mapping) else names[self.blocks[0]])
        for level in set(self.levels.values()):
            if abs((at_one := evaluate(level.map, 1.0)) - 1.0) > TOLERANCE_AT_ONE:
                warnings.warn(
                    f"pc.level: coefficients {list(level.map)} have g(1) = {at_one:.4g}, so PC multiplies the largest "
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
    def levels(self) -> dict[str, Level]:
        """The level of each entry of `blocks` with its map, found once; also after unpickling, which calls no __init__."""
        given: Mapping[str, Any] = (
            self.level if isinstance(self.level, Mapping) else dict.fromkeys(self.blocks, self.level)
        )
        if set(given) != set(self.blocks):
            raise UserError(
                f"pc.level names {sorted(given)} but pc.blocks names {sorted(self.blocks)}; give one level for each"
            )
        return {block: resolve(level) for block, level in given.items()}

    @property
    def only_level(self) -> Level:
        """The level of a config that has one, as that of `for_block`."""
        return self.levels[self.blocks[0]]

    def for_blocks(self, entries: Sequence[str]) -> "PCConfig":
        """The configuration of some entries of `blocks`."""
        levels = {entry: self.levels[entry] for entry in entries}
        return self._with(
            blocks=tuple(entries), level={entry: one.name for entry, one in levels.items()}, levels=levels
        )

    def for_block(self, entry: str) -> "PCConfig":
        """The configuration of one entry of `blocks`, with one level; heads and splits are resolved by then."""
        level = self.levels[entry]
        return self._with(blocks=(entry,), level=level.name, levels={entry: level}, heads=(), splits=None)

    def _with(self, **attributes: Any) -> "PCConfig":
        """A copy with other attributes, without __post_init__, which would repeat its checks and warnings."""
        one = copy(self)
        vars(one).update(attributes)
        return one
