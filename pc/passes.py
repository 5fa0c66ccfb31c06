"""Both passes of schedule "step" on full matrices: what a matrix's owner computes once per optimizer step.

`pc.effective_weight`, `pc.spectral.power_iteration` and autograd are the simple reference for the same results. These
versions are faster: the power iteration reuses the Gram matrix, the gradient takes fewer matmuls (`polynomial.vjp`),
and scale factors multiply the small square matrices instead of [n, m] ones, which saves passes over memory.
"""

from contextlib import contextmanager

import torch
from torch import Tensor

from pc import polynomial
from pc.config import PCConfig
from pc.spectral import power_iteration_by_gram, spectral_norm_estimate


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


def _polynomial_precision(config: PCConfig):
    """Matmul precision of the polynomial; everything else runs in float32."""
    return matmul_precision("tf32" if config.compute_dtype == "tf32" else "ieee")


@torch.no_grad()
@matmul_precision("ieee")
def materialise(config: PCConfig, raw: Tensor, *rest: Tensor, iterate: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """PC(W), and the u and v it was computed with.

    Args:
        config: with one level.
        raw: W [B, n, m].
        rest: gamma [B, 1] if learnable, u [B, n], v [B, m].
        iterate: whether u and v advance first.

    Returns:
        PC(W) [B, n, m], and u and v after `power_iterations` more power iterations.
    """
    *gamma, u, v = rest
    matrix = raw.to(_precision(config, raw))
    with _polynomial_precision(config):
        gram = polynomial.gram_matrix(matrix)
    if iterate:
        u, v = power_iteration_by_gram(raw, gram.to(raw.dtype), u, v, config.power_iterations)
    s = spectral_norm_estimate(raw, u, v)
    with _polynomial_precision(config):
        weight = polynomial.apply(
            config.map, matrix, gram=gram, divisor=s[:, None, None], scale=_scale(config, s, gamma)[:, None, None]
        )
    return weight.to(raw.dtype), u, v


@torch.no_grad()
@matmul_precision("ieee")
def pull_back(config: PCConfig, raw: Tensor, gradient: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The gradients with respect to W and gamma from that with respect to PC(W).

    Args:
        config: with one level.
        raw: W [B, n, m].
        gradient: with respect to PC(W) [B, n, m].
        rest: gamma [B, 1] if learnable, and the u [B, n] and v [B, m] that this PC(W) was computed with.

    Returns:
        The gradient of W [B, n, m] and, if there is a gamma, that of gamma [B, 1].
    """
    *gamma, u, v = rest
    precision = _precision(config, raw)
    s = spectral_norm_estimate(raw, u, v)
    scale = _scale(config, s, gamma)
    with _polynomial_precision(config):
        d_weight, value_product, matrix_product = polynomial.vjp(
            config.map,
            raw.to(precision),
            gradient.to(precision),
            divisor=s[:, None, None],
            scale=scale[:, None, None],
        )
    # the gradient through the divisor s = u^T W v + epsilon
    along_s = (scale / s * matrix_product)[:, None, None]
    d_weight = d_weight.to(raw.dtype).addcmul_(along_s * u[:, :, None], v[:, None, :], value=-1.0)
    if not gamma:
        return (d_weight,)
    return d_weight, ((s if config.norm_recovery else 1.0) * value_product)[:, None].to(raw.dtype)


def _precision(config: PCConfig, raw: Tensor) -> torch.dtype:
    return torch.bfloat16 if config.compute_dtype == "bfloat16" else raw.dtype


def _scale(config: PCConfig, s: Tensor, gamma: list[Tensor]) -> Tensor:
    """The factor of g(W / s), [B]: gamma times the recovered norm."""
    scale = s if config.norm_recovery else torch.ones_like(s)
    return scale * gamma[0][:, 0] if gamma else scale
