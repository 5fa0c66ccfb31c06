"""The polynomial maps that PC applies to singular values (`pc.maps`), evaluated on matrices.

On a matrix `A = U diag(sigma) V^T` the map needs only one Gram matrix: `g(A) = p(A A^T) A = A p(A^T A)`
equals `U diag(g(sigma)) V^T` (paper, proposition 1).
"""

import torch
from torch import Tensor

from pc.maps import COEFFICIENTS, POLAR_EXPRESS, Coefficients, Map, evaluate, resolve, stages  # noqa: F401


def gram_matrix(matrix: Tensor) -> Tensor:
    """The smaller of `A A^T` and `A^T A`, [..., s, s], for `A` [..., n, m]."""
    return matrix.mT @ matrix if matrix.size(-2) > matrix.size(-1) else matrix @ matrix.mT


def apply(
    map: Map, matrix: Tensor, *, gram: Tensor | None = None, divisor: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """`scale * g(A / divisor)` for matrices `A` of shape [..., n, m], batched over leading dimensions; same shape out.

    One matmul computes the smaller Gram matrix `G` [s, s], ceil(k / 2) (none for k = 1) compute `p(G)` of degree k, and
    one multiplies it by `A`. Divisor and scale are applied to the square matrices, so neither costs another pass over
    `A`.

    Args:
        gram: `gram_matrix(A)` if already computed.
        divisor: [..., 1, 1]; None for 1.
        scale: [..., 1, 1]; None for 1.
    """
    batch = matrix.reshape(-1, *matrix.shape[-2:])
    factor = None if divisor is None else divisor.reshape(-1, 1, 1).reciprocal()
    composite = stages(map)
    for index, coefficients in enumerate(composite):
        gram = gram_matrix(batch) if gram is None else gram.reshape(-1, *gram.shape[-2:])
        sums, _ = _sums(coefficients, gram if factor is None else _scaled(gram, factor.square()))
        if scale is not None and index == len(composite) - 1:
            factor = scale.reshape(-1, 1, 1) if factor is None else factor * scale.reshape(-1, 1, 1)
        polynomial = sums[0] if factor is None else _scaled(sums[0], factor)
        batch = batch @ polynomial if batch.size(-2) > batch.size(-1) else polynomial @ batch
        gram = factor = None  # those of the first stage
    return batch.reshape(matrix.shape)


def vjp(
    map: Map, matrix: Tensor, gradient: Tensor, *, divisor: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Vector-Jacobian product of `apply`: the gradient with respect to `A`, given that of `scale * g(A / divisor)`.

    Autograd computes the same. At level 4 autograd takes 6 matmuls of [s, s] by [s, l] and 6 of [s, s]; this takes 4
    and 5, because every factor is symmetric and `g` itself is not needed.

    The returned gradient treats divisor and scale as constants; two inner products give a caller the gradients of
    these.

    Args:
        matrix: `A` [..., n, m].
        gradient: `H`, with respect to the result [..., n, m].
        divisor: [..., 1, 1]; None for 1.
        scale: [..., 1, 1]; None for 1.

    Returns:
        The gradient with respect to `A` [..., n, m], and the inner products `<g(N), H>` and `<dN, N>`, [...] each,
        where `N = A / divisor` and `dN` is the gradient of `<g(N), H>` with respect to `N`. Inner products have at
        least float32.
    """
    first, *others = stages(map)
    batch, gradient = (x.reshape(-1, *x.shape[-2:]) for x in (matrix, gradient))
    one = torch.ones(1, 1, 1, device=matrix.device, dtype=torch.promote_types(matrix.dtype, torch.float32))
    divisor, scale = (one if x is None else x.reshape(-1, 1, 1) for x in (divisor, scale))
    if others:  # the value is that of the last stage, the gradient goes back through the first
        gradient, value_product, _ = vjp(tuple(others), apply(first, batch, divisor=divisor), gradient)
        result, _, matrix_product = _stage_vjp(first, batch, divisor, scale, gradient)
    else:
        result, value_product, matrix_product = _stage_vjp(first, batch, divisor, scale, gradient)
    leading = matrix.shape[:-2]
    return result.reshape(matrix.shape), value_product.reshape(leading), matrix_product.reshape(leading)


def _sums(coefficients: Coefficients, gram: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """`p(G)` by Horner's rule in `G^2` (Paterson and Stockmeyer, 1973), for `G` [B, s, s].

    Returns:
        The sums `V_j = V_{j+1} G^2 + a_{2j+1} G + a_{2j} I`, where `V_0` is `p(G)`, and `G^2`. In the last sum
        `V_{j+1}` is the number `a_k` if the degree k is even, and absent if k is odd.
    """
    degree = len(coefficients) - 1
    square = gram @ gram if degree > 1 else None
    first = (degree - 1) // 2  # j of the last sum, which is computed first
    value = coefficients[2 * first + 1] * gram
    if square is not None and degree % 2 == 0:
        value = torch.add(value, square, alpha=coefficients[degree])
    value.diagonal(dim1=-2, dim2=-1).add_(coefficients[2 * first])
    sums = [value]
    for j in reversed(range(first)):
        assert square is not None
        value = torch.baddbmm(gram, value, square, beta=coefficients[2 * j + 1])
        value.diagonal(dim1=-2, dim2=-1).add_(coefficients[2 * j])
        sums.insert(0, value)
    return sums, square


def _stage_vjp(
    coefficients: Coefficients, matrix: Tensor, divisor: Tensor, scale: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`vjp` of one stage, for [B, n, m]; divisor and scale are [B, 1, 1] or [1, 1, 1] in at least float32.

    `A` is wide (of a tall one all is transposed), `N = A / divisor`, `G = N N^T`, `X = G^2`, and `dx` is the gradient
    of `<p(G) N, H> = <p(G), H N^T>` with respect to `x`. Back through the sums `V_j` of `_sums`:

        dV_0 = H N^T    dV_{j+1} = dV_j X    dG = sum_j a_{2j+1} dV_j    dX = sum_j V_{j+1} dV_j
        X = G G      adds dX G + G dX to dG. Only dG + dG^T is used, so dX G may be its transpose: add G (dX + dX^T).
        G = N N^T    M = dG + dG^T    dN = p(G) H + M N    <dN, N> = <p(G), H N^T> + <M, G>
    """
    if matrix.size(-2) > matrix.size(-1):
        result, value_product, matrix_product = _stage_vjp(coefficients, matrix.mT, divisor, scale, gradient.mT)
        return result.mT, value_product, matrix_product
    degree = len(coefficients) - 1
    factor = divisor.reciprocal()
    gram = (matrix @ matrix.mT).mul_(factor.square())
    sums, square = _sums(coefficients, gram)
    d_sum = gradient @ matrix.mT  # without `factor`, which is applied at the end: what follows is linear in it
    value_product = _inner_product(sums[0], d_sum)
    d_gram = coefficients[1] * d_sum
    if square is not None:
        d_square = torch.zeros_like(gram)
        for j, inner in enumerate(sums[1:], start=1):
            torch.baddbmm(d_square, inner, d_sum, out=d_square)
            d_sum = d_sum @ square
            d_gram.add_(d_sum, alpha=coefficients[2 * j + 1])
        if degree % 2 == 0:
            d_square.add_(d_sum, alpha=coefficients[degree])
        torch.baddbmm(d_gram, gram, d_square + d_square.mT, out=d_gram)
    left, right = sums[0], d_gram + d_gram.mT
    matrix_product = value_product + _inner_product(right, gram)
    value_product, matrix_product = (product * factor[:, 0, 0] for product in (value_product, matrix_product))
    # Multiply factor and scale first: the cube of a small factor underflows in float32; in PC's use their product is
    # gamma.
    outer = factor * scale
    left.mul_(outer)
    right.mul_(factor.square() * outer)
    result = left @ gradient
    return torch.baddbmm(result, right, matrix, out=result), value_product, matrix_product


def _scaled(matrix: Tensor, factor: Tensor) -> Tensor:
    """The product with a factor [B, 1, 1] that may have more precision than the matrix; rounded only once."""
    return (matrix * factor).to(matrix.dtype)


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    """[B, s, s] to [B], summed in at least float32."""
    return (a * b).sum((-2, -1), dtype=torch.promote_types(a.dtype, torch.float32))
