"""`PCConfig` and `Cut`: which weights PC applies to, and how. Training, scoring and plots share it. Needs no torch."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pc.errors import UserError
from pc.levels import Coefficients, Map, resolve

# The paper's short names for the linear layers of a Llama block, as suffixes of module names:
# TorchTitan's first, then Hugging Face's.
BLOCK_SUFFIXES: dict[str, tuple[str, ...]] = {
    "q": ("attention.wq", "self_attn.q_proj"),
    "k": ("attention.wk", "self_attn.k_proj"),
    "v": ("attention.wv", "self_attn.v_proj"),
    "o": ("attention.wo", "self_attn.o_proj"),
    "gate": ("feed_forward.w1", "mlp.gate_proj"),
    "down": ("feed_forward.w2", "mlp.down_proj"),
    "up": ("feed_forward.w3", "mlp.up_proj"),
}
BLOCK_GROUPS: dict[str, tuple[str, ...]] = {"qk": ("q", "k"), "ffn": ("gate", "up", "down")}

SCHEDULES = ("forward", "step")
COMPUTE_DTYPES = ("float32", "tf32", "bfloat16")

Level = int | str | Coefficients


@dataclass(frozen=True)
class Cut:
    """The parts of a weight, in the order of their rows."""

    blocks: tuple[str, ...] = ("",)
    """Name of each part: q, k, v, o, gate, up, down, or one of your own that `PCConfig.blocks` does not name."""

    sizes: tuple[int, ...] = ()
    """Relative number of rows of each part; empty: all equal."""

    repeats: int = 1
    """How often the parts follow each other: GPT-NeoX stores q, k and v of one head, then of the next."""

    head_dim: int = 0
    """Rows of one matrix, if each part is cut into heads."""

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

    cuts: Mapping[str, Cut | None] | None = None
    """How weights other than those of plain linear layers are cut into matrices (`pc.Cut`), by patterns of parameter
    names; None: not one of the blocks. Classes in `pc.cuts.KNOWN` need no entry."""

    power_iterations: int = 10
    """Power iterations per optimizer step (q in algorithm 3)."""

    norm_recovery: bool = True
    """Multiply by the estimated spectral norm after the polynomial, so that the weight keeps its norm."""

    learnable_gamma: bool = True
    """Multiply by one learnable scalar per matrix, initialised to 1."""

    schedule: str = "step"
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
                f"pc.level names {sorted(levels)} but pc.blocks names {sorted(self.blocks)}; give one level for each block"
            )
        try:
            maps = {block: resolve(level) for block, level in levels.items()}
        except (ValueError, TypeError) as error:
            raise UserError(f"pc.level: {error}") from None
        levels = {block: level if isinstance(level, (int, str)) else maps[block] for block, level in levels.items()}
        object.__setattr__(self, "level", levels if isinstance(self.level, Mapping) else levels[self.blocks[0]])
        if self.power_iterations < 1:
            raise UserError(f"pc.power_iterations must be at least 1, got {self.power_iterations}")
        for key, choices in (("schedule", SCHEDULES), ("compute_dtype", COMPUTE_DTYPES)):
            if getattr(self, key) not in choices:
                raise UserError(f"pc.{key} must be one of {', '.join(choices)}, got {getattr(self, key)!r}")
        if self.schedule == "forward" and self.heads:
            raise UserError('pc.heads needs pc.schedule = "step"; with "forward" a layer is one matrix')
        if self.schedule == "forward" and self.compute_dtype == "tf32":
            # TF32 is a process-wide switch; a compiled graph cannot set it for some of its matmuls only.
            raise UserError('pc.compute_dtype = "tf32" needs pc.schedule = "step"; with "forward" use "float32"')

    @cached_property
    def map(self) -> Map:
        """The map g of a config with one level (see `for_block`)."""
        assert not isinstance(self.level, Mapping)
        return resolve(self.level)

    def for_block(self, block: str) -> "PCConfig":
        """The configuration of one entry of `blocks`, with that entry's level."""
        level = self.level[block] if isinstance(self.level, Mapping) else self.level
        return replace(self, level=level, blocks=(block,), heads=(), cuts=None)


def block_of(name: str) -> str | None:
    """The paper's short name (q, k, v, o, gate, up, down) of a Llama linear layer; None for any other."""
    for block, suffixes in BLOCK_SUFFIXES.items():
        if name.endswith(suffixes):
            return block
    return None


def block_factor(factors: Mapping[str, float], layer: str) -> float:
    """The factor of a layer in {block or group: factor}; 1 if no entry matches, the first one that does."""
    return next((factor for entry, factor in factors.items() if matches(entry, layer)), 1.0)


def matches(entry: str, name: str, block: str | None = None) -> bool:
    """Whether an entry of `PCConfig.blocks` (block, group or pattern) matches the layer or parameter `name`.

    Args:
        block: its short name, if it does not follow from the name.
    """
    if entry in BLOCK_GROUPS or entry in BLOCK_SUFFIXES:
        return (block or block_of(name)) in BLOCK_GROUPS.get(entry, (entry,))
    return fnmatch.fnmatchcase(name, entry)
