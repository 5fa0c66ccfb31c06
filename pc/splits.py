"""A stored weight as the matrices that PC or Muon works on, and back.

A weight is stored as [N, m], or [E, N, m] for a stack of E independent ones, or transposed: [m, N], [E, m, N]. Its N
rows (outputs) belong to parts, such as q, k and v of a fused projection. Each part is one matrix, or one for each head.

    stored [12, m]                    MatrixSplit(("q", "k", "v"), repeats=2): size 2, rows of q 4
    rows 0:2   q of head 0     ->     q [4, m] of rows 0:2 and 6:8      with gamma, u [4], v [m] of its own
    rows 2:4   k of head 0     ->     k [4, m] of rows 2:4 and 8:10                 ...
    rows 4:6   v of head 0            not chosen by `PCConfig.blocks`: its rows stay as they are
    rows 6:8   q of head 1 ...
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pc.config import MatrixSplit, PCConfig
from pc.errors import UserError
from pc.method import Method, method_of
from pc.owner import matrix_cost
from pc.spectral import initial_vectors

Kept = Sequence[Sequence[Tensor]]
"""For each part: what its method's `write` keeps for `pull_back`."""


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

    @property
    def method(self) -> Method:
        assert self.config is not None
        return method_of(self.config)


@dataclass(frozen=True)
class WeightSplit:
    """A `MatrixSplit` of a weight of known shape.

    Functions take a batch of B such weights [B, ...] that are P matrices each, and with it

        gamma    [B, P]
        u        [B, rows of all P matrices together]
        v        [B, P, m], or [B, m] for P = 1, as in a `PCLinear`
    """

    parts: tuple[Part, ...]
    columns: int
    repeats: int
    transposed: bool
    stack: tuple[int, ...]
    """leading dimensions of the weight: () or (E,)"""

    @property
    def chosen(self) -> list[Part]:
        """The parts that are preconditioned."""
        return [part for part in self.parts if part.config is not None]

    @property
    def cost(self) -> float:
        """Relative FLOPs of one weight of the stack."""
        return sum(part.count * matrix_cost((part.rows, self.columns)) for part in self.chosen)

    def describe(self) -> str:
        """What defines PC(W): the shapes and the methods of the matrices."""
        matrices = [f"{part.count} of [{part.rows}, {self.columns}], {part.method.describe()}" for part in self.chosen]
        return (f"{self.stack[0]} times " if self.stack else "") + "; ".join(matrices)

    @property
    def gamma_shape(self) -> tuple[int, ...]:
        return *self.stack, sum(part.count for part in self.chosen)

    @property
    def u_shape(self) -> tuple[int, ...]:
        return *self.stack, sum(part.count * part.rows for part in self.chosen)

    @property
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

    def split_weight(self, weight: Tensor) -> list[Tensor]:
        """[B', rows, columns]"""
        rows = zip(self.parts, self._rows(weight), strict=True)
        return [x.reshape(-1, part.rows, self.columns) for part, x in rows if part.config is not None]

    def split_gamma(self, gamma: Tensor) -> list[Tensor]:
        """[B', 1]"""
        return self._split(gamma, [1 for _ in self.chosen])

    def split_u(self, u: Tensor) -> list[Tensor]:
        """[B', rows]"""
        return self._split(u, [part.rows for part in self.chosen])

    def split_v(self, v: Tensor) -> list[Tensor]:
        """[B', columns]"""
        return self._split(v, [self.columns for _ in self.chosen])

    # And these are their inverses.

    def join_weight(self, matrices: Sequence[Tensor], base: Tensor) -> Tensor:
        """The stored weights; rows that are not chosen are those of `base`, weights as stored."""
        chosen = iter(matrices)
        rows = [
            other if part.config is None else next(chosen).reshape(-1, self.repeats, part.size, self.columns)
            for part, other in zip(self.parts, self._rows(base), strict=True)
        ]
        whole = (rows[0] if len(rows) == 1 else torch.cat(rows, -2)).flatten(1, 2)
        return whole.mT if self.transposed else whole

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of `split_gamma`, and of `split_u`."""
        flat = [x.reshape(len(x) // part.count, -1) for part, x in zip(self.chosen, tensors, strict=True)]
        return flat[0] if len(flat) == 1 else torch.cat(flat, 1)

    def join_v(self, v: Sequence[Tensor]) -> Tensor:
        return self.join(v).reshape(-1, *self.v_shape[len(self.stack) :])

    # What the owner of stored weights computes, once per optimizer step: `pc.owner` calls these with a batch of B weights
    # [B, ...] and their gammas, u and v.

    def write(
        self, orig: Tensor, gamma: Tensor, u: Tensor, v: Tensor, *, advance: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Kept]:
        """`Method.write` of every chosen part.

        Returns:
            PC(W) as stored; the new u and v; estimates [2]; and what `pull_back` can reuse. The estimates say in how many
            matrices a second start replaced u and v, and its largest estimate divided by `u^T W v`.
        """
        results = [
            part.method.write(*tensors, advance=advance)
            for part, *tensors in zip(self.chosen, self.split_weight(orig), *self._split_all(gamma, u, v), strict=True)
        ]
        weights, of_u, of_v, found = zip(*(of_part[:4] for of_part in results), strict=True)
        # as `second_opinion` decides
        replaced = sum((one > part.method.reach).sum() for part, one in zip(self.chosen, found, strict=True))
        estimates = torch.stack([replaced.to(orig.dtype), torch.cat(found).max()])
        return (
            self.join_weight(weights, base=orig),
            self.join(of_u),
            self.join_v(of_v),
            estimates,
            [of[4:] for of in results],
        )

    def pull_back(
        self, orig: Tensor, gradient: Tensor, gamma: Tensor, u: Tensor, v: Tensor, *, kept: Kept = ()
    ) -> tuple[Tensor, Tensor]:
        """The gradients with respect to W (as stored) and the gammas, from that with respect to PC(W).

        Rows that are not preconditioned keep their gradient.
        """
        matrices, gradients = self.split_weight(orig), self.split_weight(gradient)
        results = [
            part.method.pull_back(*tensors, *of_part)
            for part, of_part, *tensors in zip(
                self.chosen,
                kept or [()] * len(matrices),
                matrices,
                gradients,
                *self._split_all(gamma, u, v),
                strict=True,
            )
        ]
        weights, gammas = zip(*results, strict=True)
        return self.join_weight(weights, base=gradient), self.join(gammas)

    def invert(self, effective: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """W as stored, u and v, so that PC(W) is the given weight."""
        matrices = zip(self.chosen, self.split_weight(effective), strict=True)
        orig, u, v = zip(*(part.method.invert(matrix) for part, matrix in matrices), strict=True)
        return self.join_weight(orig, base=effective), self.join(u), self.join_v(v)

    def _split_all(self, gamma: Tensor, u: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return self.split_gamma(gamma), self.split_u(u), self.split_v(v)

    def _rows(self, weight: Tensor) -> Sequence[Tensor]:
        """Views [B, repeats, size, m] of each part's rows."""
        weight = weight.mT if self.transposed else weight
        return weight.unflatten(-2, (self.repeats, -1)).split([part.size for part in self.parts], dim=-2)

    def _split(self, tensor: Tensor, widths: list[int]) -> list[Tensor]:
        lengths = [part.count * width for part, width in zip(self.chosen, widths, strict=True)]
        pieces = zip(widths, tensor.flatten(1).split(lengths, dim=1), strict=True)
        return [x.reshape(-1, width) for width, x in pieces]


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
