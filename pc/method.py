"""The paper's method, on batches of full matrices: an odd polynomial g of the spectrally normalised weight.

    s = u^T W v + epsilon                    estimate of the largest singular value
    PC(W) = gamma s.detach() g(W / s)        (algorithm 1, line 6)

The gradient flows through the divisor s, but not through the factor s.detach(), which puts the norm back.

`apply` is the reference. `evaluate` and `pull_back` give the same results faster: the power iteration and its second start
reuse the Gram matrix, the gradient takes fewer matmuls (`polynomial.vjp`), and scale factors multiply the small square matrices
instead of [n, m] ones, which saves passes over memory. Matrices go on to `pc.polynomial`, where each pass ends.
"""

import math
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pc import maps, polynomial
from pc.config import PCConfig
from pc.half import Matrices, rounded

# Added to the estimated spectral norm to avoid dividing by zero for a zero matrix (the value in the released code).
EPSILON = 1e-7

SECOND_PRODUCTS = 10  # with the Gram matrix: as many as the paper's power iterations
# The fractional parts of its multiples are spread evenly over [0, 1): hardly any direction is orthogonal to such a start.
# Their mean must not be 0, or (1, ..., 1) would be.
GOLDEN_RATIO = 0.6180339887498949


class Method:
    """PC(W) = gamma s.detach() g(W / s) of one matrix, with the map g of `PCConfig.level`.

    u and v follow the leading singular vectors of W, once per optimizer step; they are constants for the gradient. Each
    matrix's owner calls `evaluate` and `pull_back` once per step (`pc.step`), with batches of B independent matrices. A
    `PCLinear` calls `apply`, in every forward pass, and `advance` on one matrix, without B.

    Args:
        config: with one level.

    Attributes:
        reach: the most, such as 1.2, that the largest singular value divided by its estimate u^T W v may be.
    """

    def __init__(self, config: PCConfig) -> None:
        self.config = config
        self.level = config.only_level
        self.reach = self.level.reach
        self._stages = maps.stages(self.level.map)
        self._precision = "tf32" if config.compute_dtype == "tf32" else "ieee"
        """of the polynomial's matmuls; everything else runs in float32"""
        self._half = config.compute_dtype == "float16"

    def __reduce__(self):
        return method_of, (self.config,)

    def describe(self) -> str:
        """What defines PC(W), in a few words."""
        name = self.level.name
        said = f"coefficients {name}" if isinstance(name, tuple) else f"level {name}"
        return said + ("" if self.config.norm_recovery else ", norm 1")

    def apply(
        self,
        weight: Tensor,  # W [..., n, m]
        gamma: Tensor | None,  # [..., 1]; None: 1
        u: Tensor,  # [..., n]
        v: Tensor,  # [..., m]
    ) -> Tensor:
        """PC(W), [..., n, m], by operations that autograd can follow: the definition."""
        s = spectral_norm_estimate(weight, u, v)[..., None, None]
        result = polynomial.apply(self.level.map, weight / s)
        scale = s.detach() if self.config.norm_recovery else None
        if gamma is not None:
            gamma = gamma.to(weight.dtype)[..., None]
            scale = gamma if scale is None else scale * gamma
        return result if scale is None else result * scale

    def advance(self, weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u and v for the next optimizer step, and the ratio of `second_start`, which has checked them."""
        u, v = power_iteration(weight, u, v, self.config.power_iterations)
        return second_start(weight, polynomial.gram_matrix(weight), u, v, self.reach)

    @torch.no_grad()
    def evaluate(
        self,
        weight: Matrices,  # W [B, n, m]
        gamma: Tensor,  # [B, 1]
        u: Tensor,  # [B, n]
        v: Tensor,  # [B, m]
        *,
        advance: bool = True,  # whether u and v advance first
    ) -> tuple[Any, ...]:
        """PC(W) [B, n, m]; the new u and v; the ratio of `second_start` [B], 0 without `advance`; and a list of square
        matrices, which `pull_back` with the same W, u and v can reuse."""
        unit = None
        with matmuls(u, self._precision):
            if self._half:
                factor, unit = rounded(weight)
            else:
                weight = factor = weight if isinstance(weight, Tensor) else torch.cat([*weight])
            gram = polynomial.gram_matrix(factor)
        with matmuls(u):
            ratio = u.new_zeros(len(u))
            if advance:
                u, v, ratio = power_iterations(factor, gram, u, v, self.config.power_iterations, self.reach)
            s = spectral_norm_estimate(weight, u, v)[:, None, None]
        scale = gamma[:, :, None] * s if self.config.norm_recovery else gamma[:, :, None]
        with matmuls(u, self._precision):
            result, kept = polynomial.apply_and_keep(
                self._stages, factor, gram=gram, divisor=s if unit is None else s * unit, scale=scale
            )
        return result, u, v, ratio, kept

    @torch.no_grad()
    def pull_back(
        self,
        weight: Matrices,  # W [B, n, m]
        gradient: Matrices,  # H, with respect to PC(W) [B, n, m]
        gamma: Tensor,  # [B, 1]
        u: Tensor,  # [B, n]
        v: Tensor,  # [B, m]
        kept: Any = (),  # what `evaluate` kept; without it, it is computed again
    ) -> tuple[Tensor, Tensor]:
        """A vector-Jacobian product: the gradients with respect to W [B, n, m] and gamma [B, 1], from H.

        Let N = W / s. Let r = s.detach(), or 1 without `norm_recovery`, so that PC(W) = gamma r g(N). Let dN be the gradient
        of <g(N), H> with respect to N. Then

            dW = gamma r / s (dN - <dN, N> u v^T)    dgamma = r <g(N), H>

        The term with u v^T is the part through the divisor s, whose gradient with respect to W is u v^T.
        """
        with matmuls(u):
            s = spectral_norm_estimate(weight, u, v)[:, None, None]
        scale = gamma[:, :, None] * s if self.config.norm_recovery else gamma[:, :, None]
        if not self._half:
            weight, gradient = (x if isinstance(x, Tensor) else torch.cat([*x]) for x in (weight, gradient))
        with matmuls(u, self._precision):
            d_weight, value_product, _ = polynomial.vjp(
                self._stages, weight, gradient, divisor=s, scale=scale, kept=kept, vectors=(u, v), half=self._half
            )
        return d_weight, (s[:, :, 0] if self.config.norm_recovery else 1.0) * value_product[:, None]


@cache
def method_of(config: PCConfig) -> Method:
    """The method of a config with one level (`PCConfig.for_block`)."""
    return Method(config)


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


def power_iterations(
    weight: Tensor,  # W, or a multiple in float16 [B, n, m]
    gram: Tensor,  # its smaller Gram matrix [B, r, r]
    u: Tensor,  # [B, n]
    v: Tensor,  # [B, m]
    steps: int,  # 1 or more
    reach: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`power_iteration` and then `second_start`, both at once, by the Gram matrix in place of the weight.

    One multiplication by `W W^T` replaces one by `W^T` and one by `W`. PC needs the Gram matrix anyway, and it is
    smaller. The two vectors are multiplied together, so that it is read once for both; the weight itself is read twice instead
    of 2 `steps` times. Rounding errors of the Gram matrix (in TF32, for example) act like iterating on a slightly different
    matrix: u and v are off by some d, and `u^T W v` only by the order of d^2.
    """
    times = _half_rows_times if weight.dtype is torch.float16 else torch.matmul
    is_tall = weight.size(-2) > weight.size(-1)
    first = _max_normalised(times(u[:, None], weight), v[:, None]) if is_tall else u[:, None]
    rows = torch.stack([first[:, 0], _second_vector(gram, u.dtype)], 1)  # [B, 2, r]
    for step in range(max(steps - 1, SECOND_PRODUCTS)):
        now = slice(0 if step < steps - 1 else 1, 2 if step < SECOND_PRODUCTS else 1)
        rows[:, now] = _max_normalised(times(rows[:, now], gram), rows[:, now])
    before_u, before_v = u[:, None].expand(-1, 2, -1), v[:, None].expand(-1, 2, -1)
    of_v = _unit(rows if is_tall else times(rows, weight), before_v)
    images = times(of_v, weight.mT)  # W v of both
    of_u = _unit(images, before_u)
    size, other = torch.linalg.vector_norm(images, dim=-1).unbind(1)  # the first is u^T W v
    ratio = other / (size + EPSILON)
    chosen = (ratio > reach)[:, None]
    return torch.where(chosen, of_u[:, 1], of_u[:, 0]), torch.where(chosen, of_v[:, 1], of_v[:, 0]), ratio


def second_start(
    weight: Tensor,  # W [..., n, m]
    gram: Tensor,  # the smaller of W W^T and W^T W, [..., r, r]
    u: Tensor,  # [..., n]
    v: Tensor,  # [..., m]
    reach: float,  # how far above 1 the map may be evaluated
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the estimate `u^T W v` of the largest singular value by a second start of power iteration, and correct it.

    A power iteration that starts from the previous step's vectors misses a direction that they have lost, or that grew in
    one step. Its estimate is then too low, and a map is bounded only up to its reach. The second start is the same dense
    vector each time, so there is nothing to save, and results are equal on any number of ranks. It finds |W v| for a unit
    vector v, so no more than the largest singular value. It misses a direction that ten products do not amplify enough,
    because all other singular values are near the largest (how often: docs/launch.md).

    Returns:
        u [..., n] and v [..., m]: where the ratio is above `reach`, the second start's, else those given. The ratio [...]: what
        the second start finds, divided by `u^T W v`; 1 if they agree.
    """
    with torch.no_grad():
        vector = _second_vector(gram, weight.dtype)
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
        ratio = torch.linalg.vector_norm(other_u, dim=-1) / spectral_norm_estimate(weight, u, v)
        is_missed = (ratio > reach)[..., None]
        return torch.where(is_missed, _unit(other_u, u), u), torch.where(is_missed, other_v, v), ratio


def _second_vector(gram: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the second start begins, [..., r]."""
    index = torch.arange(1, gram.size(-1) + 1, device=gram.device, dtype=dtype)
    return (index * GOLDEN_RATIO).frac().sub(0.4).expand(gram.shape[:-1])


def spectral_norm_estimate(weight: Matrices, u: Tensor, v: Tensor) -> Tensor:
    """`u^T W v + epsilon` of shape [...] for `weight` [..., n, m]; differentiable in `weight`. Of several batches, [B]."""
    if not isinstance(weight, Tensor):
        parts = zip(weight, *(x.split([len(one) for one in weight]) for x in (u, v)), strict=True)
        return torch.cat([spectral_norm_estimate(*part) for part in parts])
    return (u * (weight @ v.unsqueeze(-1)).squeeze(-1)).sum(-1) + EPSILON


def _half_rows_times(rows: Tensor, matrix: Tensor) -> Tensor:
    """[B, k, n] times a float16 [B, n, m]; sums are float32."""
    return polynomial.wide_product(rows.to(matrix.dtype), matrix).to(rows.dtype)


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _max_normalised(vector: Tensor, previous: Tensor) -> Tensor:
    """The vector divided by its largest |entry|, so that its squares cannot overflow; the previous one if it is zero."""
    size = torch.linalg.vector_norm(vector, math.inf, dim=-1, keepdim=True)
    return torch.where(size > 0, vector / size, previous)


def _unit(vector: Tensor, previous: Tensor) -> Tensor:
    vector = _max_normalised(vector, previous)
    return vector / vector.norm(dim=-1, keepdim=True)


@contextmanager
def matmuls(like: Tensor, precision: str | None = "ieee"):
    """Matmuls in the dtype of `like`, also if the caller is under autocast; on a GPU in the precision "ieee" (plain float32)
    or "tf32", whatever the process-wide setting is; None: as it is.

    CPU matmuls stay float32. This changes the CUDA setting only: torch's older switch,
    `set_float32_matmul_precision`, raises an error if the user has set the new one.
    """
    kind, setting = like.device.type, torch.backends.cuda.matmul
    is_lowered = kind != "meta" and torch.is_autocast_enabled(kind)
    before = precision and setting.fp32_precision  # a compiled layer, with None, must not ask
    if precision:
        setting.fp32_precision = precision
    try:
        with torch.autocast(kind, enabled=False) if is_lowered else nullcontext():
            yield
    finally:
        if precision:
            setting.fp32_precision = before
