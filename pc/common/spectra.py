"""Singular values and condition numbers."""

import math

import torch
from torch import Tensor


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values, ascending, [..., min(n, m)] in float64; NaN for a matrix that is not finite.

    They are square roots of the eigenvalues of the smaller Gram matrix, several times cheaper than a
    singular value decomposition. Squaring loses half of float64's digits: values below 1e-8 of the
    largest are inaccurate.
    """
    finite = matrix.isfinite().all(-1).all(-1)
    # A decomposition of NaN raises an error and would end a training run that could show what went wrong.
    matrix = torch.where(finite[..., None, None], matrix, 0.0).double()
    gram = matrix.mT @ matrix if matrix.size(-2) > matrix.size(-1) else matrix @ matrix.mT
    sigma = torch.linalg.eigvalsh(gram).clamp(min=0.0).sqrt()
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
