"""Blocks: the linear layers of a Llama by the paper's names (q, k, v, o, gate, up, down). Needs no torch."""

import fnmatch
from collections.abc import Iterable

# How the names of their modules end: in TorchTitan, then in Hugging Face's models.
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


def block_of(name: str) -> str | None:
    """The block that a module of this name is; None for any other."""
    for block, suffixes in BLOCK_SUFFIXES.items():
        if any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes):
            return block
    return None


def matches(entry: str, name: str, block: str | None = None) -> bool:
    """Whether an entry of `PCConfig.blocks` (block, group or pattern) matches the layer or parameter `name`.

    Args:
        block: for a fused weight, the block of the part asked about; by default it is read from the name. A part whose
            block is not in `BLOCK_SUFFIXES`, such as "z", never matches, not even a pattern.
    """
    if block and block not in BLOCK_SUFFIXES:
        return False
    if entry in BLOCK_GROUPS or entry in BLOCK_SUFFIXES:
        return (block or block_of(name)) in BLOCK_GROUPS.get(entry, (entry,))
    return fnmatch.fnmatchcase(name, entry)


def names_layer(entries: Iterable[str], layer: str) -> bool:
    """Whether an entry matches a linear layer, by the layer's name or by that of its weight."""
    return any(matches(entry, name) for entry in entries for name in (layer, f"{layer}.weight"))
