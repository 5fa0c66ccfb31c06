"""`PCConfig` and `MatrixSplit`: which weights PC applies to, and how. Training, scoring and plots share it. Needs no
torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pc.blocks import BLOCK_GROUPS, BLOCK_SUFFIXES
from pc.errors import UserError
from pc.maps import Coefficients, Map, resolve

METHODS = {"polynomial": "pc.methods.normalised_polynomial.NormalisedPolynomial"}
"""What PC(W) can be: {name: class}. A class is imported when its name is used."""

MODES = ("step", "forward")
COMPUTE_DTYPES = ("float32", "tf32", "bfloat16")

Level = int | str | Coefficients


@dataclass(frozen=True)
class MatrixSplit:
    """How a stored weight is split into matrices: its parts, in the order of their rows."""

    blocks: tuple[str, ...] = ("",)
    """Name of each part: q, k, v, o, gate, up, down, or any other word for rows that get no PC."""

    sizes: tuple[int, ...] = ()
    """Relative number of rows of each part; empty: all equal."""

    repeats: int = 1
    """How often the parts follow each other: GPT-NeoX stores q, k and v of one head, then of the next."""

    head_dim: int = 0
    """Rows of one matrix, if each part is split into heads."""

    transposed: bool = False
    """Stored as [inputs, outputs]."""


@dataclass(frozen=True)
class PCConfig:
    """How weights are preconditioned (paper, algorithm 1).

    Raises:
        UserError: an invalid value; the message names the field and valid values.
    """

    level: Level | Mapping[str, Level] = 4
    """Strength: 1 to 4, or "polar_express"; or your own coefficients of p from degree 0 up, such as
    [2.083, -1.643, 0.560]; or a mapping from each entry of `blocks` to one of these."""

    blocks: tuple[str, ...] = ("o", "ffn")
    """Weights to precondition: q, k, v, o, gate, up, down, the groups qk and ffn, or patterns of module or parameter
    names such as "model.layers.*.mlp.fc1"."""

    heads: tuple[str, ...] = ()
    """Blocks out of q, k, v whose weights are one matrix for each attention head."""

    splits: Mapping[str, MatrixSplit | None] | None = None
    """How weights other than those of plain linear layers are split into matrices (`pc.MatrixSplit`), by patterns of
    parameter names; None: not one of the blocks. Classes in `pc.targets.KNOWN` need no entry."""

    power_iterations: int = 10
    """Power iterations per optimizer step (q in algorithm 3)."""

    norm_recovery: bool = True
    """Multiply by the estimated spectral norm after the polynomial, so that the weight keeps its norm."""

    learnable_gamma: bool = True
    """Multiply by one learnable scalar per matrix, initialised to 1."""

    method: str = "polynomial"
    """What PC(W) is, by its name in `METHODS`."""

    mode: str = "step"
    """"step": compute PC(W) once per optimizer step; forward passes are those of the plain model. "forward": compute it
    in every forward pass, inside the autograd graph: the readable reference."""

    compute_dtype: str = "float32"
    """Precision of the polynomial's matmuls: "float32" (the weight's own), "tf32", "bfloat16"."""

    def __post_init__(self) -> None:
        for key in ("blocks", "heads"):
            names = getattr(self, key)
            object.__setattr__(self, key, (names,) if isinstance(names, str) else tuple(names))
        if not self.blocks:
            raise UserError("pc.blocks is empty; name at least one, for example o or ffn")
        for name in self.blocks:
            if name not in BLOCK_SUFFIXES and name not in BLOCK_GROUPS and "." not in name and "*" not in name:
                known = " ".join([*BLOCK_SUFFIXES, *BLOCK_GROUPS])
                raise UserError(f"pc.blocks: {name!r} is not a block; use {known}, or a full-name pattern")
        if unknown := set(self.heads) - {"q", "k", "v"}:
            raise UserError(f"pc.heads: {sorted(unknown)[0]!r} is not one of q, k, v")
        levels: Mapping[str, Any] = (
            self.level if isinstance(self.level, Mapping) else dict.fromkeys(self.blocks, self.level)
        )
        if set(levels) != set(self.blocks):
            raise UserError(
                f"pc.level names {sorted(levels)} but pc.blocks names {sorted(self.blocks)}; give one level for each"
            )
        try:
            maps = {block: resolve(level) for block, level in levels.items()}
        except (ValueError, TypeError) as error:
            raise UserError(f"pc.level: {error}") from None
        levels = {block: level if isinstance(level, (int, str)) else maps[block] for block, level in levels.items()}
        object.__setattr__(self, "level", levels if isinstance(self.level, Mapping) else levels[self.blocks[0]])
        if self.power_iterations < 1:
            raise UserError(f"pc.power_iterations must be at least 1, got {self.power_iterations}")
        for key, choices in (("method", METHODS), ("mode", MODES), ("compute_dtype", COMPUTE_DTYPES)):
            if getattr(self, key) not in choices:
                raise UserError(f"pc.{key} must be one of {', '.join(choices)}, got {getattr(self, key)!r}")
        if self.mode == "forward" and self.heads:
            raise UserError('pc.heads needs pc.mode = "step"; with "forward" a layer is one matrix')
        if self.mode == "forward" and self.compute_dtype == "tf32":
            # TF32 is a process-wide switch; a compiled graph cannot set it for some of its matmuls only.
            raise UserError('pc.compute_dtype = "tf32" needs pc.mode = "step"; with "forward" use "float32"')

    @cached_property
    def map(self) -> Map:
        """The map g of a config with one level (see `for_block`)."""
        assert not isinstance(self.level, Mapping)
        return resolve(self.level)

    def for_block(self, block: str) -> "PCConfig":
        """The configuration of one entry of `blocks`, with that entry's level."""
        level = self.level[block] if isinstance(self.level, Mapping) else self.level
        return replace(self, level=level, blocks=(block,), heads=(), splits=None)
