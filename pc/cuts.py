"""A weight is one matrix or several: how it is cut, and the cuts of known model classes.

Stored weights are [N, m], or [E, N, m] for a stack of E independent ones, or transposed: [m, N], [E, m, N]. The N rows
(outputs) belong to parts, such as q, k and v of a fused projection; each part is one matrix, or one for each head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pc.config import Cut, PCConfig
from pc.errors import UserError
from pc.levels import described
from pc.owner import matrix_cost
from pc.spectral import initial_vectors


@dataclass(frozen=True)
class Part:
    """Rows of a weight that are `count` matrices [rows, columns]."""

    config: Any
    """a PCConfig with one level, or None: not preconditioned"""
    size: int
    """rows in each repeat"""
    rows: int
    count: int


@dataclass(frozen=True)
class Form:
    """A `Cut` of a weight of known shape. Tensors of a batch [B, ...] of such weights have these kinds and shapes:

    "w": the weight, [B, N, m], as stored
    "g": gammas, [B, P], where P is the number of matrices of one weight
    "u": left singular vectors of all matrices in a row, [B, ...]
    "v": right singular vectors, [B, m] for P = 1, otherwise [B, P, m]
    """

    parts: tuple[Part, ...]
    columns: int
    repeats: int
    transposed: bool
    stack: tuple[int, ...]
    """leading dimensions of the weight: () or (E,)"""

    @property
    def chosen(self) -> list[Part]:
        return [part for part in self.parts if part.config is not None]

    @property
    def matrices(self) -> list[tuple[int, int, PCConfig]]:
        """(rows, columns, config) of every preconditioned matrix."""
        return [(part.rows, self.columns, part.config) for part in self.chosen for _ in range(part.count)] * math.prod(
            self.stack
        )

    @property
    def cost(self) -> float:
        """Relative FLOPs of one weight of the stack."""
        return sum(part.count * matrix_cost((part.rows, self.columns)) for part in self.chosen)

    def __str__(self) -> str:
        """What defines PC(W): the shapes, levels and norms of the matrices."""
        matrices = [
            f"{part.count} of [{part.rows}, {self.columns}], {described(part.config.map)}"
            + ("" if part.config.norm_recovery else ", norm 1")
            for part in self.chosen
        ]
        return (f"{self.stack[0]} times " if self.stack else "") + "; ".join(matrices)

    @property
    def kinds(self) -> str:
        """of the tensors that make PC(W): W, its gammas if learnable, u and v"""
        return "wguv" if self.chosen[0].config.learnable_gamma else "wuv"

    def shape_of(self, kind: str) -> tuple[int, ...]:
        """Shape of the weight's tensor of kind "g", "u" or "v"."""
        count = sum(part.count for part in self.chosen)
        rows = sum(part.count * part.rows for part in self.chosen)
        shapes = {"g": (count,), "u": (rows,), "v": (count, self.columns) if count > 1 else (self.columns,)}
        return *self.stack, *shapes[kind]

    def initial_vectors(self, name: str) -> tuple[Tensor, Tensor]:
        """Random unit vectors u and v (float32, CPU), which depend only on the weight's name."""
        batch = math.prod(self.stack)
        drawn = [
            initial_vectors(f"{name}.{index}" if index else name, (batch * part.count, part.rows, self.columns))
            for index, part in enumerate(self.chosen)
        ]
        u, v = (self.join(kind, [pair[i] for pair in drawn]) for i, kind in enumerate("uv"))
        return u.reshape(self.shape_of("u")), v.reshape(self.shape_of("v"))

    def cut(self, kind: str, tensor: Tensor) -> list[Tensor]:
        """A batched tensor as matrices [B', rows, columns], vectors [B', rows] or [B', columns], or gammas [B', 1] of
        each chosen part, where B' is B times the part's matrices."""
        if kind == "w":
            rows = zip(self.parts, self._rows(tensor), strict=True)
            return [x.reshape(-1, part.rows, self.columns) for part, x in rows if part.config is not None]
        widths = [{"g": 1, "u": part.rows, "v": self.columns}[kind] for part in self.chosen]
        lengths = [part.count * width for part, width in zip(self.chosen, widths, strict=True)]
        pieces = zip(widths, tensor.flatten(1).split(lengths, dim=1), strict=True)
        return [x.reshape(-1, width) for width, x in pieces]

    def join(self, kind: str, pieces: list[Tensor], base: Tensor | None = None) -> Tensor:
        """The inverse of `cut`; rows that are not chosen are those of `base`, a weight as stored."""
        if kind != "w":
            rows = [x.reshape(len(x) // part.count, -1) for part, x in zip(self.chosen, pieces, strict=True)]
            joined = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            return joined.reshape(len(joined), *self.shape_of(kind)[len(self.stack) :])
        found = iter(pieces)
        others: Sequence[Any] = [None] * len(self.parts) if base is None else self._rows(base)
        rows = [
            other if part.config is None else next(found).reshape(-1, self.repeats, part.size, self.columns)
            for part, other in zip(self.parts, others, strict=True)
        ]
        whole = (rows[0] if len(rows) == 1 else torch.cat(rows, -2)).flatten(1, 2)
        return whole.mT if self.transposed else whole

    def _rows(self, weight: Tensor) -> Sequence[Tensor]:
        """Views [B, repeats, size, m] of each part's rows."""
        weight = weight.mT if self.transposed else weight
        return weight.unflatten(-2, (self.repeats, -1)).split([part.size for part in self.parts], dim=-2)

    def apply(self, function: Callable, kinds: str, tensors: Sequence[Tensor], results: str) -> tuple[Tensor, ...]:
        """`function(config, *matrices and vectors)` of every part, joined again.

        Args:
            kinds: of the tensors, such as "wguv". Rows that are not chosen are those of the last "w".
            results: kinds of what the function returns; it may return fewer.
        """
        cut = [self.cut(kind, tensor) for kind, tensor in zip(kinds, tensors, strict=True)]
        found = [function(part.config, *of_part) for part, *of_part in zip(self.chosen, *cut, strict=True)]
        base = tensors[kinds.rindex("w")] if len(self.chosen) < len(self.parts) else None
        return tuple(self.join(kind, list(pieces), base) for kind, pieces in zip(results, zip(*found, strict=True)))


def form_of(
    name: str, shape: Sequence[int], cut: Cut, configs: Sequence[PCConfig | None], head_dims: Sequence[int]
) -> Form:
    """The `Form` of a weight.

    Args:
        name, shape: of the parameter, as stored.
        configs: of each part; None: not preconditioned.
        head_dims: of each part; 0: not cut into heads.

    Raises:
        UserError: the cut does not fit the shape.
    """
    *stack, rows, columns = shape
    if cut.transposed:
        rows, columns = columns, rows
    sizes = cut.sizes or (1,) * len(cut.blocks)
    unit, rest = divmod(rows, cut.repeats * sum(sizes))
    parts = []
    for config, size, head_dim in zip(configs, sizes, head_dims, strict=True):
        total = cut.repeats * size * unit
        height = head_dim or total
        parts.append(Part(config, size * unit, height, total // height))
        rest += total % height
    if rest or len(stack) > 1:
        raise UserError(f"pc.cuts: {cut} does not fit {name} of shape {[*shape]}")
    return Form(tuple(parts), columns, cut.repeats, cut.transposed, tuple(stack))


def _query_key_value(attention: Any) -> Cut:
    heads, groups = attention.config.num_attention_heads, attention.config.num_key_value_heads
    return Cut(("q", "k", "v"), sizes=(heads, groups, groups))


_EXPERTS = {"gate_up_proj": Cut(("gate", "up")), "down_proj": Cut(("down",))}
_NUMBERED = {"w1": "gate", "w2": "down", "w3": "up"}

# Weights of transformers' and TorchTitan's model classes that are not plain linear layers of the usual names:
# parameters by the class of the module that they belong to. A function gives the cut of a module. None: known, and not
# one of the blocks.
KNOWN: dict[str, dict[str, Cut | Callable[[Any], Cut] | None]] = {
    "Phi3Attention": {"qkv_proj.weight": _query_key_value},
    "Phi3MLP": {"gate_up_proj.weight": Cut(("gate", "up"))},
    "GPT2Attention": {
        "c_attn.weight": Cut(("q", "k", "v"), transposed=True),
        "c_proj.weight": Cut(("o",), transposed=True),
    },
    "GPT2MLP": {"c_fc.weight": Cut(("up",), transposed=True), "c_proj.weight": Cut(("down",), transposed=True)},
    "GPTNeoXAttention": {
        "query_key_value.weight": lambda module: Cut(("q", "k", "v"), repeats=module.config.num_attention_heads),
        "dense.weight": Cut(("o",)),
    },
    "GPTNeoXMLP": {"dense_h_to_4h.weight": Cut(("up",)), "dense_4h_to_h.weight": Cut(("down",))},
    "BertSelfAttention": {f"{name}.weight": Cut((name[0],)) for name in ("query", "key", "value")},
    "BertSelfOutput": {"dense.weight": Cut(("o",))},
    "BertIntermediate": {"dense.weight": Cut(("up",))},
    "BertOutput": {"dense.weight": Cut(("down",))},
    "ViTAttention": {f"{block}_proj.weight": Cut((block,)) for block in "qkvo"},
    "ViTMLP": {"fc1.weight": Cut(("up",)), "fc2.weight": Cut(("down",))},
    "MixtralExperts": {**_EXPERTS},
    "MixtralTopKRouter": {"weight": None},
    "Qwen3MoeExperts": {**_EXPERTS},
    "Qwen3MoeTopKRouter": {"weight": None},
    "DeepseekV3Experts": {**_EXPERTS},
    "DeepseekV3MLP": {f"{block}_proj.weight": Cut((block,)) for block in ("gate", "up", "down")},
    "DeepseekV3TopkRouter": {"weight": None},
    "DeepseekV3Attention": {
        "q_a_proj.weight": Cut(("q",)),
        "q_b_proj.weight": Cut(("q",)),
        "kv_a_proj_with_mqa.weight": None,  # keys and values have it in common
        "kv_b_proj.weight": lambda module: Cut(
            ("k", "v"), sizes=(module.qk_nope_head_dim, module.v_head_dim), repeats=module.num_heads
        ),
    },
    "GptOssExperts": {  # gate and up alternate
        "gate_up_proj": lambda module: Cut(("gate", "up"), repeats=module.gate_up_proj.size(-1) // 2, transposed=True),
        "down_proj": Cut(("down",), transposed=True),
        "gate_up_proj_bias": None,
        "down_proj_bias": None,
    },
    "GptOssTopKRouter": {"weight": None},
    # TorchTitan's; other classes of these names have other parameters
    "Attention": {
        "wq_a.weight": Cut(("q",)),
        "wq_b.weight": Cut(("q",)),
        "wkv_a.weight": None,
        "wkv_b.weight": lambda module: Cut(
            ("k", "v"), sizes=(module.qk_nope_head_dim, module.v_head_dim), repeats=module.n_heads
        ),
    },
    "FeedForward": {f"{key}.weight": Cut((block,)) for key, block in _NUMBERED.items()},
    "GroupedExperts": {key: Cut((block,)) for key, block in _NUMBERED.items()},
    "TokenChoiceTopKRouter": {"gate.weight": None},
}


def known_cuts(module: nn.Module) -> dict[str, Cut | None]:
    """Cuts of the parameters of a known class, by their names in the module."""
    known = KNOWN.get(type(module).__name__, {}).items()
    present = {key: cut for key, cut in known if hasattr(module, key.partition(".")[0])}
    return {key: cut(module) if callable(cut) else cut for key, cut in present.items()}
