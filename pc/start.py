"""A start that preserves the function: W for which PC(W) is a given weight.

With the weight's singular values t sigma_1, W = sigma_1 U diag(x) V^T where x is the smallest root of g(x) = t, and 1 for
the largest. Then u^T W v = sigma_1 with the leading vectors u and v, gamma is 1, and PC(W) is the weight to rounding.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pc import polynomial
from pc.config import PCConfig
from pc.errors import UserError
from pc.linear import named_pc_linears
from pc.owner import run_on_owners

GRID = 10_001  # points of [0, 1] between which the roots are looked for
TOLERANCE = 1e-6  # of g(1) = 1, on which the largest singular value depends


@torch.no_grad()
def preserve(models: nn.Module | Iterable[nn.Module], schedule=None) -> None:
    """Take each PC layer's weight as what PC(W) is to be: write W into the weight, and its leading vectors into u and v.

    Singular value decompositions, once, each matrix on one owner.

    Args:
        models: the model or its parts, sharded or not; weights are the given ones.
        schedule: the `pc.StepSchedule` if there is one, which has not materialised yet. Without one, layers of
            schedule "step" keep the vectors for it.

    Raises:
        UserError: a map or setting with which no W gives the weight.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    layers = {name: layer for model in models for name, layer in named_pc_linears(model)}
    for layer in layers.values():
        require_possible(layer.pc_config)
        if schedule is None and layer.pc_config.schedule == "step":
            layer.start_vectors = layer.weight.new_empty(layer.out_features), layer.weight.new_empty(layer.in_features)
    if schedule is not None:
        vectors = {name: (state.u, state.v) for name, state in schedule.layers.items()}
    else:
        vectors = {name: layer.start_vectors or (layer.u, layer.v) for name, layer in layers.items()}
    weights = {name: schedule.layers[name].weight if schedule else layer.weight for name, layer in layers.items()}
    run_on_owners(
        preserving,
        inputs=[(weights[name],) for name in layers],
        outputs=[(weights[name], *vectors[name]) for name in layers],
        keys=[layer.pc_config for layer in layers.values()],
    )
    for layer in layers.values():
        if layer.gamma is not None:
            layer.gamma.fill_(1.0)
        if layer.pc_config.schedule == "forward":
            layer.missing_call = ""


def require_possible(config: PCConfig) -> None:
    """Raises UserError with the reason why a start cannot preserve the function."""
    levels = config.level.values() if isinstance(config.level, Mapping) else [config.level]
    for level in levels:
        at_one = polynomial.evaluate(polynomial.resolve(level), torch.ones(1, dtype=torch.float64)).item()
        if abs(at_one - 1.0) > TOLERANCE:
            raise UserError(
                f'pc.start = "preserve" needs g(1) = 1, but level {level} has {at_one:.6g}; set pc.start = "raw", which takes '
                "the given weights as W"
            )
    if not config.norm_recovery:
        raise UserError(
            'pc.start = "preserve" needs pc.norm_recovery = true, without which PC(W) has norm 1; or set pc.start = "raw", '
            "which takes the given weights as W"
        )


@torch.no_grad()
def preserving(config: PCConfig, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W with PC(W) = `weight`, and its leading singular vectors.

    Args:
        config: with one level.
        weight: [B, n, m].

    Returns:
        W [B, n, m], u [B, n], v [B, m].
    """
    # in float64: a decomposition in float32 alone is off by 5e-6 at 512 x 1408, and this is done once
    left, singular_values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    largest = singular_values[:, :1]
    relative = singular_values / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    roots = smallest_root(config.map, relative)
    roots[:, 0] = 1.0
    raw = left * (largest * roots)[:, None, :] @ right
    return raw.to(weight.dtype), left[:, :, 0].to(weight.dtype), right[:, 0].to(weight.dtype)


def smallest_root(map: polynomial.Map, values: Tensor) -> Tensor:
    """The smallest x in [0, 1] with g(x) = value for each of `values` in [0, 1] (float64, any shape): by a grid of g up
    to its first crossing, and bisection there."""
    grid = torch.linspace(0.0, 1.0, GRID, dtype=torch.float64, device=values.device)
    reached = polynomial.evaluate(map, grid).cummax(0).values
    above = torch.searchsorted(reached, values.contiguous()).clamp(1, GRID - 1)
    low, high = grid[above - 1], grid[above]
    for _ in range(50):
        middle = (low + high) / 2
        is_below = polynomial.evaluate(map, middle) < values
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return torch.where(values > 0, (low + high) / 2, torch.zeros_like(values))
