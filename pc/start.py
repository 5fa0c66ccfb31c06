"""Start from trained weights: find W such that PC(W) equals a given weight.

If the weight has singular values t sigma_1, then W = sigma_1 U diag(x) V^T, where x is the smallest root of g(x) = t,
and 1 for the largest. With its leading singular vectors u and v, u^T W v = sigma_1. With gamma = 1, PC(W) equals the
weight up to rounding.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pc import polynomial
from pc.config import PCConfig
from pc.errors import UserError
from pc.linear import PCLinear
from pc.owner import Plan
from pc.weights import named_weights

GRID = 10_001  # grid points on [0, 1] that bracket the roots
TOLERANCE = 1e-6  # of g(1) = 1; an error there is a relative error of the largest singular value


@torch.no_grad()
def preserve(models: nn.Module | Iterable[nn.Module]) -> None:
    """Treat each marked weight as PC(W): write the matching W into it, and its leading singular vectors into u, v.

    Runs one singular value decomposition per matrix, on its owner rank.

    Args:
        models: the model or its parts, with the given weights, before the first `materialise`; if sharded, after
            `pc.schedule`.

    Raises:
        UserError: no W exists for this map or these settings, or weights are on the meta device.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    weights = [weight for model in models for _, weight in named_weights(model)]
    for weight in weights:
        for part in weight.form.chosen:
            require_possible(part.config)
        if weight.parameter.is_meta:
            raise UserError(f"{weight.name} is on the meta device; call pc.preserve once the weights exist")
        if weight.schedule is not None and weight.schedule.has_started:
            raise UserError(f"{weight.name} holds PC(W) already; call pc.preserve before pc.schedule(model, optimizer)")
    for weight in weights:
        if isinstance(weight.module, PCLinear):
            weight.module.start_pc()
            weight.u, weight.v = weight.module.u, weight.module.v
        elif weight.u is None:
            weight.u, weight.v = (weight.parameter.new_empty(weight.form.shape_of(kind)) for kind in "uv")
        weight.is_loaded_pc = False
    inputs = [(weight.parameter,) for weight in weights]
    outputs = [(weight.parameter, weight.u, weight.v) for weight in weights]
    plan = Plan(inputs, outputs, [weight.form for weight in weights])
    plan.run(lambda form, weight: form.apply(preserving, "w", (weight,), "wuv"), inputs, outputs)
    for weight in weights:
        if weight.gamma is not None:
            weight.gamma.fill_(1.0)


def require_possible(config: PCConfig) -> None:
    """Raise a `UserError` with the reason if no W can have the given PC(W)."""
    for level in config.level.values() if isinstance(config.level, Mapping) else [config.level]:
        at_one = polynomial.evaluate(polynomial.resolve(level), 1.0)
        if abs(at_one - 1.0) > TOLERANCE:
            raise UserError(
                f'pc.start = "preserve" needs g(1) = 1, but level {level} has {at_one:.6g}; set pc.start = "raw" to '
                "use the given weights as W"
            )
    if not config.norm_recovery:
        raise UserError(
            'pc.start = "preserve" needs pc.norm_recovery = true, because PC(W) has norm 1 without it; or set '
            'pc.start = "raw" to use the given weights as W'
        )


@torch.no_grad()
def preserving(config: PCConfig, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W such that PC(W) = `weight`, and its leading singular vectors.

    Args:
        config: with one level.
        weight: [B, n, m].

    Returns:
        W [B, n, m], u [B, n], v [B, m].
    """
    # float64, because a decomposition in float32 has an error of 5e-6 at 512 x 1408, and this runs only once
    left, singular_values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    largest = singular_values[:, :1]
    relative = singular_values / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    roots = smallest_root(config.map, relative)
    roots[:, 0] = 1.0
    raw = left * (largest * roots)[:, None, :] @ right
    return raw.to(weight.dtype), left[:, :, 0].to(weight.dtype), right[:, 0].to(weight.dtype)


def smallest_root(map: polynomial.Map, values: Tensor) -> Tensor:
    """The smallest x in [0, 1] with g(x) = value, for each of `values` in [0, 1] (float64, any shape).

    A grid brackets the first crossing; bisection refines it."""
    grid = torch.linspace(0.0, 1.0, GRID, dtype=torch.float64, device=values.device)
    reached = polynomial.evaluate(map, grid).cummax(0).values
    above = torch.searchsorted(reached, values.contiguous()).clamp(1, GRID - 1)
    low, high = grid[above - 1], grid[above]
    for _ in range(50):
        middle = (low + high) / 2
        is_below = polynomial.evaluate(map, middle) < values
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return torch.where(values > 0, (low + high) / 2, torch.zeros_like(values))
