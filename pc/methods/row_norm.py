"""Weight normalisation by rows (Salimans and Kingma, arXiv:1602.07868): a length and a direction for each row.

    PC(W)_i = gamma_i l_i W_i / |W_i|          gamma: learnable, one for each row;  l_i: the first |W_i|, a constant

So training starts from W itself, and afterwards gamma alone changes the length. A row that starts at zero gets its l_i
with its first step. Without `norm_recovery` l is 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pc.methods.base import Method
from pc.spectral import EPSILON


class RowNorm(Method):
    """Rows whose length is gamma's alone. `u` holds l, [..., n]; 0: not known yet."""

    uses_vectors = False

    def count_gammas(self, rows: int) -> int:
        return rows

    def describe(self) -> str:
        return "rows of their first norm" if self.config.norm_recovery else "rows of norm 1"

    def initial_vectors(self, name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.zeros(shape[:-1]), torch.zeros(*shape[:-2], shape[-1])

    def advance(self, weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lengths = torch.linalg.vector_norm(weight, dim=-1)
        return torch.where(u == 0, lengths, u), v, weight.new_zeros(weight.shape[:-2])

    def apply(self, weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(weight, dim=-1).clamp(min=EPSILON)  # [..., n]
        scale = torch.where(u == 0, norms.detach(), u) if self.config.norm_recovery else torch.ones_like(u)
        if gamma is not None:
            scale = scale * gamma.to(weight.dtype)
        return weight * (scale / norms)[..., None]

    def invert(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return weight, torch.linalg.vector_norm(weight, dim=-1), weight.new_zeros(*weight.shape[:-2], weight.size(-1))

    def require_invertible(self) -> None:
        if not self.config.norm_recovery:
            raise self._no_inverse()
