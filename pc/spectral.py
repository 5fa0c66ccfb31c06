"""Spectral norms by warm-started power iteration; singular values and condition numbers."""

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from pc.polynomial import gram_matrix

# Added to the estimated spectral norm to avoid dividing by zero for a zero matrix (the value in the released code).
EPSILON = 1e-7

SECOND_PRODUCTS = 10  # with the Gram matrix: as many as the paper's power iterations
# The fractional parts of its multiples are spread evenly over [0, 1): hardly any direction is orthogonal to such a start.
# Their mean must not be 0, or (1, ..., 1) would be.
GOLDEN_RATIO = 0.6180339887498949


def initial_vectors(name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Random unit vectors to start power iteration for weights [..., n, m]: `u` [..., n] and `v` [..., m], float32,
    CPU.

    They depend only on the weight's name and shape, so they are the same for any number of ranks and pipeline stages.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1  # 63 bits, which a seed may have
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(*shape[:-2], size, generator=generator, device="cpu") for size in shape[-2:])
    return u / u.norm(dim=-1, keepdim=True), v / v.norm(dim=-1, keepdim=True)


def power_iteration(weight: Tensor, u: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Move `u`, `v` towards the leading singular vectors of `weight` (paper, algorithm 3).

    Args:
        weight: [..., n, m].
        u: [..., n] unit vectors from the previous call (a warm start).
        v: [..., m] unit vectors.
        steps: how many times to multiply by the weight's transpose and by the weight.

    Returns:
        New `u` and `v`. For a zero weight they stay unchanged: zero vectors could never recover.
    """
    with torch.no_grad():
        for _ in range(steps):
            v = _unit(_product(weight.mT, u), v)
            u = _unit(_product(weight, v), u)
    return u, v


def power_iteration_by_gram(weight: Tensor, gram: Tensor, u: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`power_iteration`, for `steps` of 1 or more, by the smaller Gram matrix [..., r, r] in place of the weight.

    One multiplication by `W W^T` replaces one by `W^T` and one by `W`. PC needs the Gram matrix anyway, and it is
    smaller; the weight itself is read twice instead of 2 `steps` times, the last time for `W v`. Rounding errors of the Gram
    matrix (in TF32, for example) act like iterating on a slightly different matrix: u and v are off by some d, and
    `u^T W v`, which uses W itself, only by the order of d^2.
    """
    with torch.no_grad():
        if weight.size(-2) > weight.size(-1):
            v = _max_normalised(_product(weight.mT, u), v)
            for _ in range(steps - 1):
                v = _max_normalised(_product(gram, v), v)
            v = v / v.norm(dim=-1, keepdim=True)
        else:
            for _ in range(steps - 1):
                u = _max_normalised(_product(gram, u), u)
            v = _unit(_product(weight.mT, u), v)
        return _unit(_product(weight, v), u), v


def second_opinion(weight: Tensor, gram: Tensor, u: Tensor, v: Tensor, reach: float) -> tuple[Tensor, Tensor, Tensor]:
    """Check the estimate `u^T W v` of the largest singular value by a second start of power iteration, and correct it.

    If the second start finds more than `reach` times the estimate, its vectors replace `u` and `v`; else they stay.

    A power iteration that starts from the previous step's vectors misses a direction that they have lost, or that grew in
    one step. Its estimate is then too low, and a map is bounded only up to its reach. The second start is the same dense
    vector each time, so there is nothing to save, and results are equal on any number of ranks. It finds |W v| for a unit
    vector v, so no more than the largest singular value. It misses a direction that ten products do not amplify enough,
    because all other singular values are near the largest (how often: docs/faults.md).

    Args:
        weight: [..., n, m].
        gram: the smaller Gram matrix, [..., r, r].
        reach: how far above 1 the map may be evaluated.

    Returns:
        u [..., n], v [..., m], and the second start's estimate divided by `u^T W v` [...], 1 if they agree. Above `reach` the
        vectors are new.
    """
    with torch.no_grad():
        size = gram.size(-1)
        index = torch.arange(1, size + 1, device=weight.device, dtype=weight.dtype)
        vector = (index * GOLDEN_RATIO).frac().sub(0.4).expand(*gram.shape[:-2], size)
        # Divided by its Frobenius norm, the Gram matrix has its largest eigenvalue between size^-1/2 and 1. So ten
        # products neither overflow nor underflow.
        scale = torch.linalg.matrix_norm(gram, keepdim=True).clamp(min=torch.finfo(gram.dtype).tiny).reciprocal()
        for _ in range(SECOND_PRODUCTS):
            vector = _product(gram, vector) * scale[..., 0]
        if weight.size(-2) > weight.size(-1):
            other_v = _unit(vector, v)
        else:
            other_v = _unit(_product(weight.mT, vector), v)
        other_u = _product(weight, other_v)
        found = torch.linalg.vector_norm(other_u, dim=-1) / spectral_norm_estimate(weight, u, v)
        is_missed = (found > reach)[..., None]
        return torch.where(is_missed, _unit(other_u, u), u), torch.where(is_missed, other_v, v), found


def spectral_norm_estimate(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """`u^T W v + epsilon` of shape [...] for `weight` [..., n, m]; differentiable in `weight`."""
    return (u * _product(weight, v)).sum(-1) + EPSILON


def without_autocast(tensor: Tensor):
    """A context in which operations keep the dtype of `tensor`, also if the caller is under autocast."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _max_normalised(vector: Tensor, previous: Tensor) -> Tensor:
    """The vector divided by its largest |entry|, so that its squares cannot overflow; the previous one if it is zero."""
    size = torch.linalg.vector_norm(vector, math.inf, dim=-1, keepdim=True)
    return torch.where(size > 0, vector / size, previous)


def _unit(vector: Tensor, previous: Tensor) -> Tensor:
    vector = _max_normalised(vector, previous)
    return vector / vector.norm(dim=-1, keepdim=True)


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values, ascending, [..., min(n, m)] in float64; NaN for a matrix that is not finite.

    They are square roots of the eigenvalues of the smaller Gram matrix, several times cheaper than a
    singular value decomposition. Squaring loses half of float64's digits: values below 1e-8 of the
    largest are inaccurate.
    """
    finite = matrix.isfinite().all(-1).all(-1)
    # A decomposition of NaN raises an error and would end a training run that could show what went wrong.
    matrix = torch.where(finite[..., None, None], matrix, 0.0).double()
    sigma = torch.linalg.eigvalsh(gram_matrix(matrix)).clamp(min=0.0).sqrt()
    return torch.where(finite[..., None], sigma, math.nan)


def modified_condition_number(singular_values: Tensor) -> Tensor:
    """Largest singular value divided by the mean of the smallest tenth (paper, section 4.2).

    Args:
        singular_values: [..., k], in any order; the smallest `ceil(k / 10)` are averaged.

    Returns:
        [...]; infinite for a matrix whose smallest tenth is zero.
    """
    ascending = singular_values.sort(dim=-1).values
    tenth = math.ceil(ascending.size(-1) / 10)
    return ascending[..., -1] / ascending[..., :tenth].mean(-1)
