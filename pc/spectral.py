"""Singular values, condition numbers, and the vectors that power iteration starts from."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pc.polynomial import gram_matrix


def initial_vectors(name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Random unit vectors to start power iteration for weights [..., n, m]: `u` [..., n] and `v` [..., m], float32,
    CPU.

    They depend only on the weight's name and shape, so they are the same for any number of ranks and pipeline stages.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1  # 63 bits, which a seed may have
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(*shape[:-2], size, generator=generator, device="cpu") for size in shape[-2:])
    return u / u.norm(dim=-1, keepdim=True), v / v.norm(dim=-1, keepdim=True)


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
