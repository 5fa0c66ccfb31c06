"""The paper's method: an odd polynomial g of the spectrally normalised weight.

    s = u^T W v + epsilon                    estimate of the largest singular value
    PC(W) = gamma s.detach() g(W / s)        (algorithm 1, line 6)

The gradient flows through the divisor s, but not through the factor s.detach(), which puts the norm back.

`apply` is the reference. `write` and `pull_back` give the same results faster: the power iteration reuses the Gram
matrix, the gradient takes fewer matmuls (`polynomial.vjp`), and scale factors multiply the small square matrices
instead of [n, m] ones, which saves passes over memory.
"""

from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pc import maps, polynomial
from pc.config import PCConfig
from pc.errors import UserError
from pc.spectral import (
    power_iteration,
    power_iteration_by_gram,
    second_opinion,
    spectral_norm_estimate,
)

GRID = 10_001  # grid points on [0, 1] that bracket the roots
TOLERANCE = 1e-6  # of g(1) = 1; an error there is a relative error of the largest singular value
USE_AS_W = 'use them as W: skip pc.preserve, or in the recipe set pc.start = "raw"'


@contextmanager
def matmul_precision(precision: str):
    """Run a GPU's float32 matmuls as "ieee" (plain float32) or "tf32", whatever the process-wide setting is.

    CPU matmuls stay float32. This changes the CUDA setting only: torch's older switch,
    `set_float32_matmul_precision`, raises an error if the user has set the new one.
    """
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = precision
    try:
        yield
    finally:
        setting.fp32_precision = before


class Method:
    """PC(W) = gamma s.detach() g(W / s) of one matrix, with the map g of `PCConfig.level`.

    u and v follow the leading singular vectors of W, once per optimizer step; they are constants for the gradient. Each
    matrix's owner calls `write` and `pull_back` once per step (`pc.preconditioner`), with batches of independent matrices:
    W [B, n, m], gamma [B, 1], u [B, n], v [B, m]. A `PCLinear` calls `apply`, in every forward pass, and
    `advance` on one matrix, without B.

    Args:
        config: with one level.

    Attributes:
        reach: the most, such as 1.2, that the largest singular value divided by its estimate u^T W v may be.
    """

    def __init__(self, config: PCConfig) -> None:
        self.config = config
        self.map = config.map
        self.reach = maps.reach(config.level)

    def describe(self) -> str:
        """What defines PC(W), in a few words."""
        level: Any = self.config.level
        said = f"coefficients {level}" if isinstance(level, tuple) else f"level {level}"
        return said + ("" if self.config.norm_recovery else ", norm 1")

    def apply(self, weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
        """PC(W), [..., n, m], by operations that autograd can follow: the definition. gamma None: 1."""
        s = spectral_norm_estimate(weight, u, v)[..., None, None]
        result = polynomial.apply(self.map, weight / s)
        scale = s.detach() if self.config.norm_recovery else None
        if gamma is not None:
            gamma = gamma.to(weight.dtype)[..., None]
            scale = gamma if scale is None else scale * gamma
        return result if scale is None else result * scale

    def advance(self, weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u and v for the next optimizer step, checked by `spectral.second_opinion`, and its third result."""
        u, v = power_iteration(weight, u, v, self.config.power_iterations)
        return second_opinion(weight, polynomial.gram_matrix(weight), u, v, self.reach)

    @torch.no_grad()
    @matmul_precision("ieee")
    def write(self, weight: Tensor, gamma: Tensor, u: Tensor, v: Tensor, *, advance: bool = True) -> tuple[Tensor, ...]:
        """PC(W). u and v advance first, unless the argument `advance` is False.

        Returns:
            PC(W) [B, n, m]; the new u and v; the third result of `second_opinion` [B], 0 without `advance`; and further
            tensors, which `pull_back` with the same W, u and v can reuse.
        """
        with self._polynomial_precision():
            gram = polynomial.gram_matrix(weight)
        found = weight.new_zeros(len(weight))
        if advance:
            u, v = power_iteration_by_gram(weight, gram, u, v, self.config.power_iterations)
            u, v, found = second_opinion(weight, gram, u, v, self.reach)
        s = spectral_norm_estimate(weight, u, v)[:, None, None]
        with self._polynomial_precision():
            result, kept = polynomial.apply_and_keep(
                self.map, weight, gram=gram, divisor=s, scale=self._scale(s, gamma)
            )
        return result, u, v, found, *kept

    @torch.no_grad()
    @matmul_precision("ieee")
    def pull_back(
        self, weight: Tensor, gradient: Tensor, gamma: Tensor, u: Tensor, v: Tensor, *kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A vector-Jacobian product: from the gradient H with respect to PC(W), those with respect to W and gamma.

        Let N = W / s. Let r = s.detach(), or 1 without `norm_recovery`, so that PC(W) = gamma r g(N). Let dN be the gradient
        of <g(N), H> with respect to N. Then

            dW = gamma r / s (dN - <dN, N> u v^T)    dgamma = r <g(N), H>

        The term with u v^T is the part through the divisor s, whose gradient with respect to W is u v^T.
        `polynomial.vjp` gives dN and both inner products.

        Args:
            gradient: H, [B, n, m].
            kept: the further tensors of `write`; without them they are computed again.

        Returns:
            dW [B, n, m] and dgamma [B, 1].
        """
        s = spectral_norm_estimate(weight, u, v)[:, None, None]
        scale = self._scale(s, gamma)
        with self._polynomial_precision():
            # the products are <g(N), H> and <dN, N>
            d_weight, value_product, matrix_product = polynomial.vjp(
                self.map, weight, gradient, divisor=s, scale=scale, kept=kept
            )
        along_s = scale / s * matrix_product[:, None, None]
        d_weight.addcmul_(along_s * u[:, :, None], v[:, None, :], value=-1.0)
        return d_weight, (s[:, :, 0] if self.config.norm_recovery else 1.0) * value_product[:, None]

    @torch.no_grad()
    def invert(self, effective: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """W = sigma_1 U diag(x) V^T for a weight with singular values t sigma_1: x is the smallest root of g(x) = t,
        and 1 for the largest. Then u^T W v = sigma_1, so PC(W) is the weight up to rounding."""
        # float64, because a decomposition in float32 has an error of 5e-6 at 512 x 1408, and this runs only once
        left, singular_values, right = torch.linalg.svd(effective.double(), full_matrices=False)
        largest = singular_values[:, :1]
        relative = singular_values / largest.clamp(min=torch.finfo(largest.dtype).tiny)
        roots = smallest_root(self.map, relative)
        roots[:, 0] = 1.0
        raw = left * (largest * roots)[:, None, :] @ right
        return raw.to(effective.dtype), left[:, :, 0].to(effective.dtype), right[:, 0].to(effective.dtype)

    def require_invertible(self) -> None:
        """Raise a `UserError` with the reason if `invert` cannot work."""
        at_one = maps.evaluate(self.map, 1.0)
        if abs(at_one - 1.0) > TOLERANCE:
            raise UserError(
                f"given weights can be preserved only if g(1) = 1, but level {self.config.level} has {at_one:.6g}; "
                + USE_AS_W
            )
        if not self.config.norm_recovery:
            raise UserError(
                f"given weights can be preserved only with norm_recovery, without which PC(W) has norm 1; or {USE_AS_W}"
            )

    def _polynomial_precision(self):
        """Matmul precision of the polynomial; everything else runs in float32."""
        return matmul_precision("tf32" if self.config.compute_dtype == "tf32" else "ieee")

    def _scale(self, s: Tensor, gamma: Tensor) -> Tensor:
        """The factor of g(W / s), [B, 1, 1]: gamma times the recovered norm."""
        return gamma[:, :, None] * (s if self.config.norm_recovery else 1.0)


def smallest_root(map: maps.Map, values: Tensor) -> Tensor:
    """The smallest x in [0, 1] with g(x) = value, for each of `values` in [0, 1] (float64, any shape).

    A grid brackets the first crossing; bisection refines it."""
    grid = torch.linspace(0.0, 1.0, GRID, dtype=torch.float64, device=values.device)
    reached = maps.evaluate(map, grid).cummax(0).values
    above = torch.searchsorted(reached, values.contiguous()).clamp(1, GRID - 1)
    low, high = grid[above - 1], grid[above]
    for _ in range(50):
        middle = (low + high) / 2
        is_below = maps.evaluate(map, middle) < values
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return torch.where(values > 0, (low + high) / 2, torch.zeros_like(values))


@cache
def method_of(config: PCConfig) -> Method:
    """The method of a config with one level (`PCConfig.for_block`)."""
    return Method(config)
