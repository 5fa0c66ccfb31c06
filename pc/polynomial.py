"""The maps that PC applies to singular values, and their evaluation on scalars and matrices.

A map is odd: `g(sigma) = sigma * p(sigma^2)`. It is written as the coefficients of `p` from degree 0 up,
so `(1.5, -0.5)` is `1.5 sigma - 0.5 sigma^3`. A composite of several maps is a tuple of such tuples, the
first applied first; every function here takes either.

On a matrix `A = U diag(sigma) V^T` the map acts through one Gram matrix, `g(A) = p(A A^T) A = A p(A^T A)`,
and gives `U diag(g(sigma)) V^T` (paper, proposition 1).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, ...]
Map = Coefficients | tuple[Coefficients, ...]

# Paper, section 3.2: the fitted maps of levels 1 to 4. Each sums to 1, so that g(1) = 1.
COEFFICIENTS: dict[int, Coefficients] = {
    1: (1.507, -0.507),
    2: (2.083, -1.643, 0.560),
    3: (2.909, -4.649, 4.023, -1.283),
    4: (3.625, -9.261, 14.097, -10.351, 2.890),
}

# Paper, table 1: the cutoff b of the piecewise-linear target min(sigma / b, 1) that each level is fitted to.
CUTOFFS: dict[int, float] = {1: 0.8, 2: 0.6, 3: 0.4, 4: 0.3}

# Paper, appendix "Overly Aggressive Spectrum Flattening": eight quintics whose composite sends nearly
# every singular value in (0, 1] to one (Amsel et al., 2025). It exists to show that flattening too much hurts.
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (7.2086, -15.5131, 9.0178),
    (3.9623, -2.5813, 0.4542),
    (3.9466, -2.5765, 0.4544),
    (3.8991, -2.5671, 0.4566),
    (3.7186, -2.5308, 0.4653),
    (3.1390, -2.3073, 0.4733),
    (2.1715, -1.5246, 0.3885),
    (1.8648, -1.2224, 0.3577),
)


def resolve(level: int | str) -> Map:
    """The map of a level: 1 to 4, or `"polar_express"`.

    Raises:
        ValueError: no such level.
    """
    if level == "polar_express":
        return POLAR_EXPRESS
    if isinstance(level, bool) or level not in COEFFICIENTS:
        raise ValueError(f'PC level {level!r} does not exist; levels are 1, 2, 3, 4 and "polar_express"')
    return COEFFICIENTS[level]


def stages(map: Map) -> tuple[Coefficients, ...]:
    """The map as a composite: one stage for plain coefficients."""
    return map if isinstance(map[0], Sequence) else (map,)


def target(cutoff: float, sigma: Tensor) -> Tensor:
    """The piecewise-linear target `min(sigma / cutoff, 1)` (paper, section 3.2)."""
    return (sigma / cutoff).clamp(max=1.0)


def fit(
    cutoff: float,
    degree: int,
    alpha: float = 4.0,
    interval: tuple[float, float] = (0.0, 1.1),
    anchored: bool = True,
) -> Coefficients:
    """Fit `sigma * p(sigma^2)` to `target(cutoff)` by weighted least squares (paper, equation 2, appendix).

    The paper samples at random; here the sample points are a fine regular grid, so that the result is
    the limit of its procedure and the same every time.

    Args:
        cutoff: b in (0, 1], above which the target is 1.
        degree: degree of `p`, at least 1; the level k of the paper.
        alpha: the error at sigma counts with weight sigma^alpha.
        interval: where to fit. Its upper end lies above 1 since the estimated spectral norm may be too small.
        anchored: hold g(1) = 1 exactly.

    Returns:
        `degree + 1` coefficients of `p` from degree 0 up.

    Raises:
        ValueError: arguments outside their ranges.
    """
    lower, upper = interval
    if not 0.0 < cutoff <= 1.0:
        raise ValueError(f"cutoff must be in (0, 1], got {cutoff}")
    if degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}")
    if not 0.0 <= lower < upper:
        raise ValueError(f"interval must satisfy 0 <= lower < upper, got {interval}")
    points = 20_000
    sigma = lower + (upper - lower) * (torch.arange(points, dtype=torch.float64) + 0.5) / points
    powers = torch.stack([sigma ** (2 * i + 1) for i in range(degree + 1)], dim=1)
    values = target(cutoff, sigma)
    if anchored:  # substitute a_0 = 1 - a_1 - ... - a_k
        powers, values = powers[:, 1:] - powers[:, :1], values - sigma
    root_weight = sigma ** (alpha / 2)
    solution = torch.linalg.lstsq(powers * root_weight[:, None], (values * root_weight)[:, None]).solution[:, 0]
    coefficients = solution.tolist()
    return tuple([1.0 - sum(coefficients), *coefficients] if anchored else coefficients)


def evaluate(map: Map, sigma: Tensor) -> Tensor:
    """`g(sigma)` elementwise, by Horner's rule; any shape."""
    for coefficients in stages(map):
        squared = sigma * sigma
        value = torch.full_like(sigma, coefficients[-1])
        for a in reversed(coefficients[:-1]):
            value = value * squared + a
        sigma = sigma * value
    return sigma


def apply(map: Map, matrix: Tensor) -> Tensor:
    """`g(A)` for matrices `A` of shape [..., n, m], batched over leading dimensions; same shape out.

    One product forms the smaller Gram matrix, Horner's rule takes `degree - 1` products of its size, and
    one product goes back to the shape of `A` (paper, appendix "Tricks for Matrix Polynomial Calculation").
    """
    for coefficients in stages(map):
        matrix = _apply_stage(coefficients, matrix)
    return matrix


def _apply_stage(coefficients: Coefficients, matrix: Tensor) -> Tensor:
    tall = matrix.size(-2) > matrix.size(-1)
    gram = matrix.mT @ matrix if tall else matrix @ matrix.mT
    value = coefficients[-1] * gram
    value.diagonal(dim1=-2, dim2=-1).add_(coefficients[-2])
    for a in reversed(coefficients[:-2]):
        value = value @ gram
        value.diagonal(dim1=-2, dim2=-1).add_(a)
    return matrix @ value if tall else value @ matrix
