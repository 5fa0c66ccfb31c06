"""A stored weight as the matrices that PC or Muon works on, and back.

A weight is stored as [N, m], or [E, N, m] for a stack of E independent ones, or transposed: [m, N], [E, m, N]. Its N
rows (outputs) belong to parts, such as q, k and v of a fused projection. Each part is one matrix, or one for each head.

    stored [12, m]                    MatrixSplit(("q", "k", "v"), repeats=2): size 2, rows of q 4
    rows 0:2   q of head 0     ->     q [4, m] of rows 0:2 and 6:8      with gamma, u [4], v [m] of its own
    rows 2:4   k of head 0     ->     k [4, m] of rows 2:4 and 8:10                 ...
    rows 4:6   v of head 0            not chosen by `PCConfig.blocks`: its rows stay as they are
    rows 6:8   q of head 1 ...

Each matrix goes on to `pc.method`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pc.assignment import matrix_cost
from pc.config import MatrixSplit, PCConfig
from pc.errors import UserError
from pc.half import Matrices, as_batch
from pc.method import Method, method_of
from pc.spectral import initial_vectors


@dataclass(frozen=True)
class Part:
    """Rows of a weight that are `count` matrices [rows, columns]."""

    config: PCConfig | None
    """with one level; None: not preconditioned"""
    size: int
    """its rows in each repeat: 2 in the example above"""
    rows: int
    """of one matrix: 4 in the example"""
    count: int

    @cached_property
    def method(self) -> Method:
        assert self.config is not None
        return method_of(self.config)


@dataclass(frozen=True)
class WeightSplit:
    """A `MatrixSplit` of a weight of known shape.

    Functions take a batch of B such weights, each of P matrices.
    """

    parts: tuple[Part, ...]
    columns: int
    repeats: int
    transposed: bool
    stack: tuple[int, ...]
    """leading dimensions of the weight: () or (E,)"""

    @cached_property
    def chosen(self) -> list[Part]:
        """The parts that are preconditioned."""
        return [part for part in self.parts if part.config is not None]

    @property
    def cost(self) -> float:
        """Relative FLOPs of PC for one weight of the stack. At level 4 a matrix takes (12 long + 12 short) short^2, if nothing
        is kept between the passes."""
        return sum(part.count * matrix_cost((part.rows, self.columns)) for part in self.chosen)

    def describe(self) -> str:
        """What defines PC(W): the shapes and the methods of the matrices."""
        matrices = [f"{part.count} of [{part.rows}, {self.columns}], {part.method.describe()}" for part in self.chosen]
        return (f"{self.stack[0]} times " if self.stack else "") + "; ".join(matrices)

    @cached_property
    def gamma_shape(self) -> tuple[int, ...]:
        return *self.stack, sum(part.count for part in self.chosen)

    @cached_property
    def u_shape(self) -> tuple[int, ...]:
        return *self.stack, sum(part.count * part.rows for part in self.chosen)

    @cached_property
    def v_shape(self) -> tuple[int, ...]:
        count = sum(part.count for part in self.chosen)
        return *self.stack, *((count, self.columns) if count > 1 else (self.columns,))

    def initial_vectors(self, name: str) -> tuple[Tensor, Tensor]:
        """u and v before the first step (float32, CPU), which depend only on the weight's name and shape."""
        batch = math.prod(self.stack)
        drawn = [
            initial_vectors(f"{name}.{index}" if index else name, (batch * part.count, part.rows, self.columns))
            for index, part in enumerate(self.chosen)
        ]
        of_u, of_v = ([pair[i].reshape(batch, -1) for pair in drawn] for i in (0, 1))
        return torch.cat(of_u, 1).reshape(self.u_shape), torch.cat(of_v, 1).reshape(self.v_shape)

    # Each of these gives one tensor for each chosen part, with B' = B times its `count`. For 5 experts [5, 24, m] that are
    # gate and up, they are two tensors [5, 12, m]. If gate and up were 3 heads each, they would be two of [15, 4, m].

    def split_weight(
        self,
        weight: Matrices,  # as stored, [B, N, m] or [B, m, N], or several such
    ) -> list[Any]:  # [B', rows, columns], or several such
        if not isinstance(weight, Tensor):
            return [*zip(*map(self.split_weight, weight), strict=True)]
        rows = zip(self.parts, self._rows(weight), strict=True)
        return [x.reshape(-1, part.rows, self.columns) for part, x in rows if part.config is not None]

    def split_vectors(
        self,
        gamma: Tensor,  # [B, P]
        u: Tensor,  # [B, rows of all P matrices together]
        v: Tensor,  # [B, P, m], or [B, m] for P = 1, as in a `PCLinear`
    ) -> list[list[Tensor]]:  # of gamma [B', 1], of u [B', rows], of v [B', columns]
        widths = [(1, part.rows, self.columns) for part in self.chosen]
        split = []
        for index, tensor in enumerate((gamma, u, v)):
            lengths = [part.count * width[index] for part, width in zip(self.chosen, widths, strict=True)]
            pieces = tensor.flatten(1).split(lengths, dim=1)
            split.append([x.reshape(-1, width[index]) for width, x in zip(widths, pieces, strict=True)])
        return split

    # And these are their inverses.

    def join_weight(
        self,
        matrices: Sequence[Tensor],  # of each chosen part, [B', rows, columns]
        base: Matrices,  # as stored: rows that are not chosen are its rows
    ) -> Tensor:  # as stored
        chosen, is_whole = iter(matrices), len(matrices) == len(self.parts)
        others: Sequence[Any] = [None] * len(self.parts) if is_whole else self._rows(as_batch(base))
        rows = [
            other if part.config is None else next(chosen).reshape(-1, self.repeats, part.size, self.columns)
            for part, other in zip(self.parts, others, strict=True)
        ]
        whole = (rows[0] if len(rows) == 1 else torch.cat(rows, -2)).flatten(1, 2)
        return whole.mT if self.transposed else whole

    def join(
        self,
        vectors: Sequence[Tensor],  # of each chosen part, [B', k] or [B']
        stored: tuple[int, ...],  # `gamma_shape`, `u_shape` or `v_shape`
    ) -> Tensor:  # [B, ...], as `split_vectors` takes them
        flat = [x.reshape(len(x) // part.count, -1) for part, x in zip(self.chosen, vectors, strict=True)]
        return (flat[0] if len(flat) == 1 else torch.cat(flat, 1)).reshape(-1, *stored[len(self.stack) :])

    # The two passes, each once per optimizer step on the owner (`pc.owner` calls them), part by part by `pc.method`.

    def evaluate(
        self,
        orig: Matrices,  # W as stored, [B, N, m] or [B, m, N], or several such
        gamma: Tensor,  # [B, P]
        u: Tensor,  # [B, rows of all P matrices together]
        v: Tensor,  # [B, P, m], or [B, m] for P = 1
        *,
        advance: bool = True,
    ) -> tuple[Any, ...]:
        """`Method.evaluate` of every chosen part: PC(W) as stored; the new u and v; the second start's ratio of each
        matrix [B, P]; and what `pull_back` can reuse."""
        results = [
            part.method.evaluate(*tensors, advance=advance)
            for part, *tensors in zip(
                self.chosen, self.split_weight(orig), *self.split_vectors(gamma, u, v), strict=True
            )
        ]
        weights, of_u, of_v, ratios, keep = zip(*results, strict=True)
        vectors = (of_u, self.u_shape), (of_v, self.v_shape), (ratios, self.gamma_shape)
        return self.join_weight(weights, base=orig), *(self.join(*one) for one in vectors), [*keep]

    def pull_back(
        self,
        orig: Matrices,  # W as stored
        gradient: Matrices,  # with respect to PC(W), as stored
        gamma: Tensor,  # [B, P]
        u: Tensor,  # [B, rows of all P matrices together]
        v: Tensor,  # [B, P, m], or [B, m] for P = 1
        kept: Any = None,  # by `evaluate` of the same weights; None: computed again
    ) -> tuple[Tensor, Tensor, Any]:
        """The gradients with respect to W (as stored) and the gammas [B, P]; and `kept` again, for a further pull back.

        Rows that are not preconditioned keep their gradient.
        """
        matrices, gradients = self.split_weight(orig), self.split_weight(gradient)
        vectors = self.split_vectors(gamma, u, v)
        results = [
            part.method.pull_back(*tensors)
            for part, *tensors in zip(
                self.chosen, matrices, gradients, *vectors, kept or [()] * len(matrices), strict=True
            )
        ]
        weights, gammas = zip(*results, strict=True)
        return self.join_weight(weights, base=gradient), self.join(gammas, self.gamma_shape), kept

    def _rows(self, weight: Tensor) -> Sequence[Tensor]:
        """Views [B, repeats, size, m] of each part's rows."""
        weight = weight.mT if self.transposed else weight
        return weight.unflatten(-2, (self.repeats, -1)).split([part.size for part in self.parts], dim=-2)


def split_of(
    name: str, shape: Sequence[int], given: MatrixSplit, configs: Sequence[PCConfig | None], head_dims: Sequence[int]
) -> WeightSplit:
    """The `WeightSplit` of a weight.

    Args:
        name, shape: of the parameter, as stored.
        configs: of each part; None: not preconditioned.
        head_dims: of each part; 0: not split into heads.

    Raises:
        UserError: the split does not fit the shape.
    """
    *stack, rows, columns = shape
    if given.transposed:
        rows, columns = columns, rows
    sizes = given.sizes or (1,) * len(given.blocks)
    unit, rest = divmod(rows, given.repeats * sum(sizes))
    parts = []
    for config, size, head_dim in zip(configs, sizes, head_dims, strict=True):
        total = given.repeats * size * unit
        height = head_dim or total
        parts.append(Part(config, size * unit, height, total // height))
        rest += total % height
    if rest or len(stack) > 1:
        raise UserError(f"pc.splits: {given} does not fit {name} of shape {[*shape]}")
    return WeightSplit(tuple(parts), columns, given.repeats, given.transposed, tuple(stack))
