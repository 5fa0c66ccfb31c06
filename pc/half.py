"""float16 factors of matmuls: as many bits of mantissa as TF32 has, at twice its rate and half the bytes, but a small range.

Numbers below 6e-8 become 0, and those above 65,504 infinite. So matrices are multiplied by a power of two before they are
rounded, which a caller divides by again in float32.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Matrices = Tensor | Sequence[Tensor]
"""[B, n, m]; or several such, which need not lie in one batch"""
HAS_COMPILER = find_spec("triton") is not None
TOP = 15
"""what is stored stays below 2^15, half of the largest float16"""


def batches_of(matrices: Matrices) -> list[Tensor]:
    return [matrices] if isinstance(matrices, Tensor) else [*matrices]


def as_batch(matrices: Matrices) -> Tensor:
    """[B, n, m], not copied where they are one batch."""
    batches = batches_of(matrices)
    return batches[0] if len(batches) == 1 else torch.cat(batches)


def norms(matrices: Matrices) -> Tensor:
    """Frobenius norms, [B, 1, 1]. In float64, in which squares of float32 neither overflow nor vanish."""
    each = [matrix for batch in batches_of(matrices) for matrix in batch]
    return torch.stack(torch._foreach_norm(each, 2, torch.float64))[:, None, None]


def power_of_two(norm: Tensor, top: int) -> Tensor:
    """A power of two, float32, whose product with the norm is in [2^(top - 1), 2^top)."""
    exponent = (top - torch.frexp(norm).exponent).clamp(-120, 120)  # of a norm of 0, infinity or NaN: any
    return torch.ldexp(torch.ones_like(norm, dtype=torch.float32), exponent)


def round_into(
    rounded: Tensor,  # float16 [B, n, m], a view is enough
    matrices: Matrices,
    factor: Tensor,  # [B, 1, 1]
) -> None:
    """Write the matrices times factor, in one pass over them: rounding is what copies them into a batch."""
    start = 0
    for batch in batches_of(matrices):
        stop = start + len(batch)
        torch.mul(batch, factor[start:stop], out=rounded[start:stop])
        start = stop


def rounded(matrices: Matrices) -> tuple[Tensor, Tensor]:
    """The matrices times a power of two, in float16 [B, n, m], and that power [B, 1, 1]. Their norms are below 2^7, so that
    entries of their Gram matrices are below 2^14."""
    unit = power_of_two(norms(matrices), top=7)
    batch = batches_of(matrices)[0]
    found = batch.new_empty(len(unit), *batch.shape[1:], dtype=torch.float16)
    round_into(found, matrices, unit)
    return found, unit


class Fused:
    """A function of tensors that a GPU with Triton computes in one kernel, compiled when it is first called there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        return torch.compile(self.plain, dynamic=True)

    def __call__(self, first: Tensor, *others: Any) -> Any:
        # a fake tensor has no kernels
        compiles = HAS_COMPILER and first.is_cuda and type(first) is Tensor
        return (self._compiled if compiles else self.plain)(first, *others)


@Fused
def add_transpose(square: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """D + D^T and <P, D>, [B], for D and P [B, r, r]."""
    return square + square.mT, (square.float() * other.float()).sum((-2, -1))


@Fused
def write_gradient(part: Tensor, outer: Tensor, gram: Tensor, linear: float, written: Tensor) -> Tensor:
    """Write M = X + X^T + `linear` S, and return <M, G>, [B], for X, S and G [B, r, r]."""
    wide = part.float()
    gradient = wide + wide.mT + linear * outer.float()
    written.copy_(gradient)
    return (gradient * gram.float()).sum((-2, -1))


@Fused
def without_rank_one(matrix: Tensor, factor: Tensor, size: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """`factor (A - size u v^T)` for A [B, n, m], factor and size [B, 1, 1], u [B, n] and v [B, m]."""
    return (matrix - (size * u[:, :, None]) * v[:, None, :]) * factor
