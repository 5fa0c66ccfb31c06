"""The polynomial maps that PC applies to singular values (`pc.maps`), evaluated on matrices.

On a matrix `A = U diag(sigma) V^T` the map needs only one Gram matrix: `g(A) = p(A A^T) A = A p(A^T A)`
equals `U diag(g(sigma)) V^T` (paper, proposition 1). In shapes, r = min(n, m) and l = max(n, m). Both passes of a step end
here; back up, `pc.owner` sends the results to the ranks that hold shards.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pc.maps import Coefficients, Map, stages


def gram_matrix(matrix: Tensor) -> Tensor:
    """The smaller of `A A^T` and `A^T A`, [..., r, r], for `A` [..., n, m]."""
    return matrix.mT @ matrix if matrix.size(-2) > matrix.size(-1) else matrix @ matrix.mT


def apply(map: Map, matrix: Tensor) -> Tensor:
    """`g(A)` for matrices `A` of shape [..., n, m], batched over leading dimensions; same shape out."""
    return apply_and_keep(stages(map), matrix)[0]


def apply_and_keep(
    composite: tuple[Coefficients, ...],  # a map's `stages`
    matrix: Tensor,  # A [..., n, m]
    *,
    gram: Tensor | None = None,  # `gram_matrix(A)` if already computed
    divisor: Tensor | None = None,  # [..., 1, 1]; None: 1
    scale: Tensor | None = None,  # [..., 1, 1]; None: 1
) -> tuple[Tensor, list[Tensor]]:
    """`scale * g(A / divisor)`, [..., n, m], and square matrices [B, r, r] that `vjp` of the same map and `A / divisor` needs
    again.

    One matmul computes the smaller Gram matrix `G` [r, r], those of `_values` compute `p(G)`, and one multiplies it by
    `A`. Divisor and scale are applied to the square matrices, so neither costs another pass over `A`.
    """
    batch = matrix.reshape(-1, *matrix.shape[-2:])
    factor = None if divisor is None else divisor.reshape(-1, 1, 1).reciprocal()
    kept: list[Tensor] = []
    for index, coefficients in enumerate(composite):
        gram = gram_matrix(batch) if gram is None else gram.reshape(-1, *gram.shape[-2:])
        gram = gram if factor is None else gram * factor.square()
        value, *inner = _values(coefficients, gram)
        kept = kept or [gram, value, *inner]  # of the first stage
        if scale is not None and index == len(composite) - 1:
            factor = scale.reshape(-1, 1, 1) if factor is None else factor * scale.reshape(-1, 1, 1)
        polynomial = value if factor is None else value * factor
        batch = batch @ polynomial if batch.size(-2) > batch.size(-1) else polynomial @ batch
        gram = factor = None  # the Gram matrix and divisor given are those of the first stage
    return batch.reshape(matrix.shape), kept


def vjp(
    composite: tuple[Coefficients, ...],  # a map's `stages`
    matrix: Tensor,  # A [..., n, m]
    gradient: Tensor,  # H, with respect to the result [..., n, m]
    *,
    divisor: Tensor | None = None,  # [..., 1, 1]; None: 1
    scale: Tensor | None = None,  # [..., 1, 1]; None: 1
    kept: Sequence[Tensor] = (),  # by `apply_and_keep` for the same map and A / divisor; empty: computed again
) -> tuple[Tensor, Tensor, Tensor]:
    """Vector-Jacobian product of `apply_and_keep`: the gradient with respect to `A`, given that of `scale * g(A / divisor)`.

    Autograd computes the same. At level 4 autograd takes 6 matmuls of [r, r] by [r, l] and 6 of [r, r]; this takes 4
    and 4, because every factor is symmetric and `g` itself is not needed; 3 and 2 with what `apply_and_keep` kept.

    The returned gradient treats divisor and scale as constants; two inner products give a caller the gradients of
    these.

    Returns:
        The gradient with respect to `A` [..., n, m], and the inner products `<g(N), H>` and `<dN, N>`, [...] each,
        where `N = A / divisor` and `dN` is the gradient of `<g(N), H>` with respect to `N`.
    """
    first, *others = composite
    batch, gradient = (x.reshape(-1, *x.shape[-2:]) for x in (matrix, gradient))
    one = matrix.new_ones(1, 1, 1)
    divisor, scale = (one if x is None else x.reshape(-1, 1, 1) for x in (divisor, scale))
    if others:  # a composite: back through the later stages, at the result of the first, then through the first
        gradient, value_product, _ = vjp(tuple(others), apply_and_keep((first,), batch, divisor=divisor)[0], gradient)
        result, _, matrix_product = _stage_vjp(first, batch, divisor, scale, gradient, kept)
    else:
        result, value_product, matrix_product = _stage_vjp(first, batch, divisor, scale, gradient, kept)
    leading = matrix.shape[:-2]
    return result.reshape(matrix.shape), value_product.reshape(leading), matrix_product.reshape(leading)


class Square(NamedTuple):
    """A polynomial as `factor * root(x)^2 + linear * x + constant`."""

    factor: float
    root: Coefficients
    linear: float
    constant: float


@cache
def complete_square(coefficients: Coefficients) -> Square | None:
    """Write a polynomial of degree 4 as a `Square`; None for other degrees.

    None also if the leading coefficient is small: then the terms of the square are much larger than the polynomial, and
    cancel.
    """
    if len(coefficients) != 5 or not coefficients[4]:
        return None
    a, b, c, d, e = coefficients
    half = d / (2 * e)
    last = (c / e - half * half) / 2
    square = Square(e, (last, half, 1.0), b - 2 * e * half * last, a - e * last * last)
    size = abs(e) * sum(map(abs, square.root)) ** 2 + abs(square.linear) + abs(square.constant)
    return square if size <= 2 * sum(map(abs, coefficients)) else None


def _values(coefficients: Coefficients, gram: Tensor) -> list[Tensor]:
    """`p(G)` for symmetric `G` [B, r, r], and then that of each polynomial inside p.

    A quadratic takes one matmul. A quartic is the square of a quadratic plus a linear term, so it takes two, and with
    smaller numbers than Horner's rule. Any other p is `G q(G) + a_0 I`: one matmul more than q. So

        degree 3:  [p(G), q(G)]       p(G) = G q(G) + a_0 I, with the quadratic q
        degree 4:  [p(G), root(G)]    p(G) = factor root(G)^2 + linear G + constant I (`complete_square`)
    """
    constant, linear, *higher = coefficients
    inner: list[Tensor] = []
    if not higher:
        value = linear * gram
    elif len(higher) == 1:
        value = torch.baddbmm(gram, gram, gram, beta=linear, alpha=higher[0])
    elif square := complete_square(coefficients):
        inner = _values(square.root, gram)
        value = torch.baddbmm(gram, inner[0], inner[0], beta=square.linear, alpha=square.factor)
        constant = square.constant
    else:
        inner = _values(coefficients[1:], gram)
        value = gram @ inner[0]
    value.diagonal(dim1=-2, dim2=-1).add_(constant)
    return [value, *inner]


def _gradient(coefficients: Coefficients, gram: Tensor, inner: Sequence[Tensor], outer: Tensor) -> Tensor:
    """The gradient of `<p(G), S>` with respect to `G`. It is symmetric, as S = `outer` [B, r, r] is.

    All values are polynomials of `G`, so they are symmetric and commute. The gradient with respect to P of `<P P, S>`
    is `S P + P S`: one matmul and its transpose. It follows how `_values` computes p:

        p = factor root^2 + linear G + constant    factor (S root + root S) goes on to root; linear S is added
        p = G q(G) + constant                      (G S + S G) / 2 goes on to q; (S q + q S) / 2 is added

    Args:
        inner: `_values` without the first.
    """
    _, linear, *higher = coefficients
    if not higher:
        return linear * outer
    if len(higher) == 1:
        half = torch.baddbmm(outer, gram, outer, beta=linear / 2, alpha=higher[0])
        return half + half.mT
    if square := complete_square(coefficients):
        half = torch.baddbmm(outer, outer, inner[0], beta=0, alpha=square.factor)  # beta=0: without the first
        return _gradient(square.root, gram, inner[1:], half + half.mT).add_(outer, alpha=square.linear)
    of_gram, of_inner = outer @ inner[0], gram @ outer
    d_inner = (of_inner + of_inner.mT).mul_(0.5)
    return _gradient(coefficients[1:], gram, inner[1:], d_inner).add_(of_gram + of_gram.mT, alpha=0.5)


def _stage_vjp(
    coefficients: Coefficients,
    matrix: Tensor,
    divisor: Tensor,
    scale: Tensor,
    gradient: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """`vjp` of one stage, for [B, n, m]; divisor and scale are [B, 1, 1] or [1, 1, 1].

    `A` is wide (of a tall one all is transposed), `N = A / divisor`, `G = N N^T`, and `D = H N^T`. Then
    `<g(N), H> = <p(G), D>`. Its gradient with respect to the symmetric G is M / 2, where M is that of `<p(G), D + D^T>`. A
    change x of N changes G by `x N^T + N x^T`, and so `<p(G), D>` by `<M / 2, x N^T + N x^T> = <M N, x>`. With that, the
    gradient dN with respect to N is

        dN = p(G) H + M N    <dN, N> = <p(G), D> + <M, G>

    In the code `d_value` is D, and `right` M, both without their factor 1 / divisor.
    """
    if matrix.size(-2) > matrix.size(-1):
        result, value_product, matrix_product = _stage_vjp(coefficients, matrix.mT, divisor, scale, gradient.mT, kept)
        return result.mT, value_product, matrix_product
    factor = divisor.reciprocal()
    if not kept:
        gram = matrix @ matrix.mT * factor.square()
        kept = [gram, *_values(coefficients, gram)]
    gram, value, *inner = kept
    d_value = gradient @ matrix.mT  # without `factor`, which is applied at the end: what follows is linear in it
    value_product = (value * d_value).sum((-2, -1))
    right = _gradient(coefficients, gram, inner, d_value + d_value.mT)
    matrix_product = value_product + (right * gram).sum((-2, -1))
    value_product, matrix_product = (product * factor[:, 0, 0] for product in (value_product, matrix_product))
    # Multiply factor and scale first: the cube of a small factor underflows in float32. With norm_recovery scale is
    # gamma s and factor 1 / s, so that their product is gamma.
    both = factor * scale
    result = (value * both) @ gradient
    right.mul_(factor.square() * both)
    return torch.baddbmm(result, right, matrix, out=result), value_product, matrix_product
