"""The polynomial maps that PC applies to singular values (`pc.maps`), evaluated on matrices.

On a matrix `A = U diag(sigma) V^T` the map needs only one Gram matrix: `g(A) = p(A A^T) A = A p(A^T A)`
equals `U diag(g(sigma)) V^T` (paper, proposition 1). In shapes, r = min(n, m) and l = max(n, m). Both passes of a step end
here; back up, `pc.owner` sends the results to the ranks that hold shards.

The gradient H of `g(N)`, where `N = A / divisor` is wide (of a tall one all is transposed), goes back so. Let `G = N N^T` and
`D = H N^T`. Then `<g(N), H> = <p(G), D>`. Its gradient with respect to the symmetric G is M / 2, where M is that of
`<p(G), D + D^T>`. A change x of N changes G by `x N^T + N x^T`, and so `<p(G), D>` by `<M / 2, x N^T + N x^T> = <M N, x>`.
With that, the gradient dN with respect to N is

    dN = p(G) H + M N    <dN, N> = <p(G), D> + <M, G>

If the divisor is u^T A v, what flows through it is `-<dN, N> u v^T`.

Factors and square matrices are in float32 or wider, or all in float16 (`pc.half`). Then sums are float32, and so are
results.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pc.half import (
    TOP,
    Matrices,
    add_transpose,
    batches_of,
    norms,
    power_of_two,
    round_into,
    rounded,
    without_rank_one,
    write_gradient,
)
from pc.maps import Coefficients, Map, complete_square, growth, stages


def gram_matrix(matrix: Tensor) -> Tensor:
    """The smaller of `A A^T` and `A^T A`, [..., r, r], for `A` [..., n, m]."""
    return product(matrix.mT, matrix) if matrix.size(-2) > matrix.size(-1) else product(matrix, matrix.mT)


def product(
    a: Tensor,  # [..., n, k]
    b: Tensor,  # [..., k, m]
    *,
    plus: Tensor | None = None,  # [B, n, m], for 3 dimensions
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor | None = None,  # where to write it
) -> Tensor:  # [..., n, m]
    """`a b`, or `alpha a b + beta plus`, in the dtype of the factors. Of float16, sums are float32 and then rounded."""
    if a.dtype is torch.float16 and not has_half_products(a):
        wide = product(a.float(), b.float(), plus=None if plus is None else plus.float(), beta=beta, alpha=alpha)
        return wide.half() if out is None else out.copy_(wide)
    return torch.matmul(a, b, out=out) if plus is None else torch.baddbmm(plus, a, b, beta=beta, alpha=alpha, out=out)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """The float32 sums of [B, n, k] times [B, k, m], both float16."""
    return torch.bmm(a, b, out_dtype=torch.float32) if has_half_products(a) else a.float() @ b.float()


def has_half_products(tensor: Tensor) -> bool:
    """Whether its device multiplies float16 with float32 sums; elsewhere, rounded factors are multiplied in float32."""
    return tensor.device.type in ("cuda", "meta")


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
    `A`. Divisor and scale are applied to the square matrices, so neither costs another pass over `A`; but of float16 `A` the
    scale may be too large or small for them.
    """
    batch, is_half = matrix.reshape(-1, *matrix.shape[-2:]), matrix.dtype is torch.float16
    factor = None if divisor is None else divisor.reshape(-1, 1, 1).reciprocal()
    kept: list[Tensor] = []
    for index, coefficients in enumerate(composite):
        if is_half and index:
            batch, unit = rounded(batch)
            factor = unit.reciprocal()
        gram = gram_matrix(batch) if gram is None else gram.reshape(-1, *gram.shape[-2:])
        if factor is not None:  # in the dtype of the Gram matrix, in one pass
            square = factor.square()
            gram = torch.mul(gram, square, out=torch.empty_like(gram)) if is_half else gram * square
        value, *inner = _values(coefficients, gram)
        kept = kept or [gram, value, *inner]  # of the first stage
        if scale is not None and index == len(composite) - 1:
            factor = scale.reshape(-1, 1, 1) if factor is None else factor * scale.reshape(-1, 1, 1)
        polynomial = value if factor is None or is_half else value * factor
        factors = (batch, polynomial) if batch.size(-2) > batch.size(-1) else (polynomial, batch)
        batch = wide_product(*factors) if is_half else torch.matmul(*factors)
        if is_half and factor is not None:
            batch.mul_(factor)
        gram = factor = None  # the Gram matrix and divisor given are those of the first stage
    return batch.reshape(matrix.shape), kept


def vjp(
    composite: tuple[Coefficients, ...],  # a map's `stages`
    matrix: Matrices,  # A [..., n, m]
    gradient: Matrices,  # H, with respect to the result [..., n, m]
    *,
    divisor: Tensor | None = None,  # [..., 1, 1]; None: 1
    scale: Tensor | None = None,  # [..., 1, 1]; None: 1
    kept: Sequence[Tensor] = (),  # by `apply_and_keep` for the same map and A / divisor; empty: computed again
    vectors: tuple[Tensor, Tensor] | None = None,  # u [B, n] and v [B, m]
    half: bool = False,  # round factors to float16; then A and H are Matrices, and A / divisor has a norm of about 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Vector-Jacobian product of `apply_and_keep`: the gradient with respect to `A`, given that of `scale * g(A / divisor)`.

    Autograd computes the same. At level 4 autograd takes 6 matmuls of [r, r] by [r, l] and 6 of [r, r]; this takes 4
    and 4, because every factor is symmetric and `g` itself is not needed; 3 and 2 with what `apply_and_keep` kept.

    Scale is a constant, and so is the divisor, unless it is `u^T A v`, of the `vectors` given; then the gradient flows through
    it too. The inner products give a caller the gradient of scale.

    Returns:
        The gradient with respect to `A` [..., n, m], and the inner products `<g(N), H>` and `<dN, N>`, [...] each,
        where `N = A / divisor` and `dN` is the gradient of `<g(N), H>` with respect to `N`.
    """
    first, *others = composite
    leading = matrix.shape[:-2] if isinstance(matrix, Tensor) else [-1]
    matrix, gradient = (x.reshape(-1, *x.shape[-2:]) if isinstance(x, Tensor) else x for x in (matrix, gradient))
    one = (matrix if isinstance(matrix, Tensor) else matrix[0]).new_ones(1, 1, 1)
    divisor, scale = (one if x is None else x.reshape(-1, 1, 1) for x in (divisor, scale))
    stage_vjp: Callable[..., tuple[Tensor, Tensor, Tensor]] = _half_stage_vjp if half else _stage_vjp
    of_others = None
    if others:  # a composite: back through the later stages, at the result of the first, then through the first
        batch, unit = rounded(matrix) if half or not isinstance(matrix, Tensor) else (matrix, one)
        after_first = apply_and_keep((first,), batch, divisor=divisor * unit)[0]
        gradient, of_others, _ = vjp(tuple(others), after_first, gradient, half=half)
    result, value_product, matrix_product = stage_vjp(first, matrix, divisor, scale, gradient, kept, vectors)
    of_result = value_product if of_others is None else of_others
    return result.reshape(*leading, *result.shape[-2:]), of_result.reshape(leading), matrix_product.reshape(leading)


def _values(coefficients: Coefficients, gram: Tensor, out: Tensor | None = None) -> list[Tensor]:
    """`p(G)` for symmetric `G` [B, r, r], written to `out` if that is given, and then that of each polynomial inside p.

    A quadratic takes one matmul. A quartic is the square of a quadratic plus a linear term, so it takes two, and with
    smaller numbers than Horner's rule. Any other p is `G q(G) + a_0 I`: one matmul more than q. So

        degree 3:  [p(G), q(G)]       p(G) = G q(G) + a_0 I, with the quadratic q
        degree 4:  [p(G), root(G)]    p(G) = factor root(G)^2 + linear G + constant I (`maps.complete_square`)
    """
    constant, linear, *higher = coefficients
    inner: list[Tensor] = []
    if not higher:
        value = torch.mul(gram, linear, out=out)
    elif len(higher) == 1:
        value = product(gram, gram, plus=gram, beta=linear, alpha=higher[0], out=out)
    elif square := complete_square(coefficients):
        inner = _values(square.root, gram)
        value = product(inner[0], inner[0], plus=gram, beta=square.linear, alpha=square.factor, out=out)
        constant = square.constant
    else:
        inner = _values(coefficients[1:], gram)
        value = product(gram, inner[0], out=out)
    diagonal = value.diagonal(dim1=-2, dim2=-1)
    if value.dtype is torch.float16:  # the constant itself is not rounded
        diagonal.copy_(diagonal.float() + constant)
    else:
        diagonal.add_(constant)
    return [value, *inner]


def _gradient(coefficients: Coefficients, gram: Tensor, inner: Sequence[Tensor], outer: Tensor) -> tuple[Tensor, float]:
    """The gradient of `<p(G), S>` with respect to `G`, as X [B, r, r] and a number: it is `X + X^T + number S`, symmetric as
    S = `outer` [B, r, r] is.

    All values are polynomials of `G`, so they are symmetric and commute. The gradient with respect to P of `<P P, S>`
    is `S P + P S`: one matmul and its transpose. It follows how `_values` computes p:

        p = factor root^2 + linear G + constant    factor (S root + root S) goes on to root; linear S is added
        p = G q(G) + constant                      (G S + S G) / 2 goes on to q; (S q + q S) / 2 is added

    Args:
        inner: `_values` without the first.
    """
    _, linear, *higher = coefficients
    if not higher:
        return linear / 2 * outer, 0.0
    if len(higher) == 1:
        return product(gram, outer, plus=outer, beta=linear / 2, alpha=higher[0]), 0.0
    if square := complete_square(coefficients):
        of_root = product(outer, inner[0], plus=outer, beta=0.0, alpha=square.factor)  # beta=0: without the first
        part, _ = _gradient(square.root, gram, inner[1:], of_root + of_root.mT)
        return part, square.linear
    of_gram, of_inner = product(outer, inner[0]), product(gram, outer)
    d_inner = (of_inner + of_inner.mT).mul_(0.5)
    part, number = _gradient(coefficients[1:], gram, inner[1:], d_inner)
    return part.add_(of_gram, alpha=0.5).add_(d_inner, alpha=number / 2), 0.0


def _stage_vjp(
    coefficients: Coefficients,
    matrix: Tensor,
    divisor: Tensor,
    scale: Tensor,
    gradient: Tensor,
    kept: Sequence[Tensor],
    vectors: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`vjp` of one stage, for [B, n, m]; divisor and scale are [B, 1, 1] or [1, 1, 1]. In the code `d_value` is D, and `right` M,
    both without their factor 1 / divisor."""
    if matrix.size(-2) > matrix.size(-1):
        vectors = vectors and (vectors[1], vectors[0])
        result, *products = _stage_vjp(coefficients, matrix.mT, divisor, scale, gradient.mT, kept, vectors)
        return result.mT, products[0], products[1]
    factor = divisor.reciprocal()
    if not kept:
        gram = gram_matrix(matrix) * factor.square()
        kept = [gram, *_values(coefficients, gram)]
    gram, value, *inner = kept
    d_value = gradient @ matrix.mT  # without `factor`, which is applied at the end: what follows is linear in it
    value_product = (value * d_value).sum((-2, -1))
    outer = d_value + d_value.mT
    part, linear = _gradient(coefficients, gram, inner, outer)
    right = part + part.mT
    if linear:
        right.add_(outer, alpha=linear)
    matrix_product = value_product + (right * gram).sum((-2, -1))
    value_product, matrix_product = (product * factor[:, 0, 0] for product in (value_product, matrix_product))
    # Multiply factor and scale first: the cube of a small factor underflows in float32. With norm_recovery scale is
    # gamma s and factor 1 / s, so that their product is gamma.
    scaled = factor * scale
    result = (value * scaled) @ gradient
    right.mul_(factor.square() * scaled)
    torch.baddbmm(result, right, matrix, out=result)
    if vectors:
        u, v = vectors
        along_divisor = scale / divisor * matrix_product[:, None, None]
        result.addcmul_(along_divisor * u[:, :, None], v[:, None, :], value=-1.0)
    return result, value_product, matrix_product


def _half_stage_vjp(
    coefficients: Coefficients,
    matrix: Matrices,
    divisor: Tensor,
    scale: Tensor,
    gradient: Matrices,
    kept: Sequence[Tensor],
    vectors: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_stage_vjp` with float16 factors: H and N lie in one matrix, so that `[P M] [H; N]` is one product."""
    batch, unit = batches_of(matrix)[0], power_of_two(norms(gradient) * growth(coefficients), TOP)
    n, m = batch.shape[-2:]
    is_tall = n > m
    both = batch.new_empty(len(unit), *((n, 2 * m) if is_tall else (2 * n, m)), dtype=torch.float16)
    upper, lower = both.chunk(2, -1 if is_tall else -2)
    round_into(upper, gradient, unit)
    round_into(lower, matrix, divisor.reciprocal().expand_as(unit))
    if is_tall:
        upper, lower, both = upper.mT, lower.mT, both.mT
    beside = both.new_empty(len(unit), min(n, m), 2 * min(n, m))
    value, right = beside.chunk(2, -1)
    if kept:
        gram, _, *inner = kept
        value.copy_(kept[1])
    else:
        gram = gram_matrix(lower)
        _, *inner = _values(coefficients, gram, out=value)
    outer, value_product = add_transpose(product(upper, lower.mT), value)
    part, linear = _gradient(coefficients, gram, inner, outer)
    gram_product = write_gradient(part, outer, gram, linear, right)
    result = wide_product(both.mT, beside.mT) if is_tall else wide_product(beside, both)
    factor = scale / divisor / unit
    if vectors:
        result = without_rank_one(result, factor, (value_product + gram_product)[:, None, None], *vectors)
    else:
        result = result.mul_(factor)
    value_product, gram_product = (one / unit[:, 0, 0] for one in (value_product, gram_product))
    return result, value_product, value_product + gram_product
