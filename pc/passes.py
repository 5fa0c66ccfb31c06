"""Both passes of schedule "step" on full matrices: what the owner of a matrix does once per optimizer step.

`pc.effective_weight` and `pc.spectral.power_iteration` are the readable definitions of the same, and autograd gives
the same gradients. Here the Gram matrix serves the power iteration too, what scales a matrix is folded into small
square ones, and the gradient takes fewer products (`polynomial.vjp`): at [n, m] each costs a pass over memory.
"""

from contextlib import contextmanager

import torch
from torch import Tensor

from pc import polynomial
from pc.config import PCConfig
from pc.spectral import power_iteration_by_gram, spectral_norm_estimate


@contextmanager
def matmul_precision(precision: str):
    """Within, a GPU multiplies float32 matrices as "ieee" (plain float32) or "tf32", whatever the process has chosen.

    A CPU's products stay float32. The setting is that of CUDA's products alone: torch's older switch,
    `set_float32_matmul_precision`, raises where a user has set this one.
    """
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        yield
    finally:
        products.fp32_precision = before


def _polynomials(config: PCConfig):
    """The precision that the configuration wants for the polynomial; all else is float32."""
    return matmul_precision("tf32" if config.compute_dtype == "tf32" else "ieee")


@torch.no_grad()
@matmul_precision("ieee")
def materialise(config: PCConfig, raw: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PC(W) and the vectors that made it.

    Args:
        config: with one level.
        raw: W [B, n, m].
        rest: gamma [B, 1] where there is one, u [B, n], v [B, m].

    Returns:
        PC(W) [B, n, m], and u and v moved on by `power_iterations` steps.
    """
    *gamma, u, v = rest
    matrix = raw.to(_precision(config, raw))
    with _polynomials(config):
        gram = polynomial.gram_matrix(matrix)
    u, v = power_iteration_by_gram(raw, gram.to(raw.dtype), u, v, config.power_iterations)
    s = spectral_norm_estimate(raw, u, v)
    with _polynomials(config):
        weight = polynomial.apply(
            config.map, matrix, gram=gram, divisor=s[:, None, None], scale=_scale(config, s, gamma)[:, None, None]
        )
    return weight.to(raw.dtype), u, v


@torch.no_grad()
@matmul_precision("ieee")
def pull_back(config: PCConfig, raw: Tensor, gradient: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The gradient of PC(W) as that of W and of gamma, with the u and v that made this PC(W).

    Args:
        config: with one level.
        raw: W [B, n, m].
        gradient: with respect to PC(W) [B, n, m].
        rest: gamma [B, 1] where there is one, u [B, n], v [B, m].

    Returns:
        The gradient of W [B, n, m] and, where there is a gamma, its own [B, 1].
    """
    *gamma, u, v = rest
    precision = _precision(config, raw)
    s = spectral_norm_estimate(raw, u, v)
    scale = _scale(config, s, gamma)
    with _polynomials(config):
        d_weight, value_product, matrix_product = polynomial.vjp(
            config.map,
            raw.to(precision),
            gradient.to(precision),
            divisor=s[:, None, None],
            scale=scale[:, None, None],
        )
    # W / s with s = u^T W v + epsilon: what flows through s
    along_s = (scale / s * matrix_product)[:, None, None]
    d_weight = d_weight.to(raw.dtype).addcmul_(along_s * u[:, :, None], v[:, None, :], value=-1.0)
    if not gamma:
        return (d_weight,)
    return d_weight, ((s if config.norm_recovery else 1.0) * value_product)[:, None].to(raw.dtype)


def _precision(config: PCConfig, raw: Tensor) -> torch.dtype:
    return torch.bfloat16 if config.compute_dtype == "bfloat16" else raw.dtype


def _scale(config: PCConfig, s: Tensor, gamma: list[Tensor]) -> Tensor:
    """What multiplies g(W / s), [B]: gamma and the recovered norm."""
    scale = s if config.norm_recovery else torch.ones_like(s)
    return scale * gamma[0][:, 0] if gamma else scale
