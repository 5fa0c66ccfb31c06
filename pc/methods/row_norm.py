"""Weight normalisation by rows (Salimans and Kingma, arXiv:1602.07868): a length and a direction for each row.

    r       = sqrt(mean of (|W_i| + epsilon)^2)                   over the rows
    PC(W)_i = gamma_i r.detach() W_i / (|W_i| + epsilon)          gamma: learnable, one for each row

Without `norm_recovery` r is 1.
"""

import torch
from torch import Tensor

from pc.methods.base import Method
from pc.spectral import EPSILON


class RowNorm(Method):
    """Rows of equal norm before gamma."""

    uses_vectors = False

    def count_gammas(self, rows: int) -> int:
        return rows

    def describe(self) -> str:
        return "rows of equal norm" + ("" if self.config.norm_recovery else ", norm 1")

    def apply(self, weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(weight, dim=-1, keepdim=True) + EPSILON  # [..., n, 1]
        scale = norms.detach().square().mean(-2, keepdim=True).sqrt() if self.config.norm_recovery else 1.0
        if gamma is not None:
            scale = scale * gamma.to(weight.dtype)[..., None]
        return weight * (scale / norms)
