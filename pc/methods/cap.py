"""A cap on singular values: PC(W) = gamma U min(sigma, cap) V^T, by matmuls alone.

With the smaller Gram matrix of W / cap, B, whose eigenvalues are (sigma / cap)^2:

    M     = (B + I + |B - I|) / 2                        max(eigenvalue, 1);  |X| = X sign(X)
    PC(W) = gamma M^(-1/2) W

sign(X) and M^(-1/2) are composite polynomials: Polar Express (`pc.maps`) and a step of Newton-Schulz. Singular values
below the cap stay as they are, however small. The worst relative error of one, just below the cap, is 3e-6 where the
norm of W is 1.1 times the cap, 3e-4 at ten times, and 3e-2 at a hundred times (`tests/unit/test_methods.py`).
"""

import torch
from torch import Tensor

from pc import polynomial
from pc.maps import POLAR_EXPRESS
from pc.methods.base import Method
from pc.spectral import spectral_norm_estimate

SIGN = (*POLAR_EXPRESS, (1.875, -1.25, 0.375))
MARGIN = 1.5  # of the squared norm, which may be underestimated: the composite diverges above 1.11


class Cap(Method):
    """No singular value above `PCConfig.cap`, times gamma."""

    def describe(self) -> str:
        return f"singular values at most {self.config.cap:g}"

    def apply(self, weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)  # bfloat16 is too coarse
        given, weight, u, v = weight, weight.to(dtype), u.to(dtype), v.to(dtype)
        relative = spectral_norm_estimate(weight, u, v).detach()[..., None, None] / self.config.cap
        bound = MARGIN * relative.square().clamp(min=1.0)  # of the eigenvalues of B, B - I and M
        gram = polynomial.gram_matrix(weight / self.config.cap)
        one = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
        excess = gram - one
        capped = (gram + one + excess @ polynomial.apply(SIGN, excess / bound)) / 2
        factor = _inverse_root(capped / bound, one) / bound.sqrt()
        if gamma is not None:
            factor = factor * gamma.to(weight.dtype)[..., None]
        return (weight @ factor if weight.size(-2) > weight.size(-1) else factor @ weight).to(given.dtype)


def _inverse_root(matrix: Tensor, one: Tensor) -> Tensor:
    """M^(-1/2) of symmetric matrices [..., r, r], by coupled Newton-Schulz iterations. Eigenvalues lie between
    (cap / norm)^2 / MARGIN, which is 6.7e-5 where the norm of W is a hundred times the cap, and 1."""
    root, inverse = matrix, one.expand_as(matrix)
    for constant, linear, quadratic in SIGN[3:]:  # the first three are for smaller values than these
        product = inverse @ root
        step = constant * one + linear * product + quadratic * (product @ product)
        root, inverse = root @ step, step @ inverse
    return inverse
