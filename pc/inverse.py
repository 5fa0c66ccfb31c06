"""W of which a given weight is PC(W): what `pc.preserve` needs, once, on each matrix's owner."""

import torch
from torch import Tensor

from pc import maps
from pc.errors import UserError
from pc.method import Method
from pc.splits import WeightSplit

GRID = 10_001  # grid points on [0, 1] that bracket the roots
TOLERANCE = 1e-6  # of g(1) = 1; an error there is a relative error of the largest singular value
USE_AS_W = 'use them as W: skip pc.preserve, or in the recipe set pc.start = "raw"'


def invert(split: WeightSplit, effective: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W as stored, u and v, so that PC(W) is the given weights, as stored; `pc.owner` calls it."""
    matrices = zip(split.chosen, split.split_weight(effective), strict=True)
    orig, u, v = zip(*(invert_matrices(part.method, matrix) for part, matrix in matrices), strict=True)
    return split.join_weight(orig, base=effective), split.join(u, split.u_shape), split.join(v, split.v_shape)


@torch.no_grad()
def invert_matrices(
    method: Method,
    effective: Tensor,  # [B, n, m]
) -> tuple[Tensor, Tensor, Tensor]:  # W [B, n, m], u [B, n], v [B, m]
    """W = sigma_1 U diag(x) V^T for a weight with singular values t sigma_1: x is the smallest root of g(x) = t,
    and 1 for the largest. Then u^T W v = sigma_1, so PC(W) is the weight up to rounding."""
    # float64, because a decomposition in float32 has an error of 5e-6 at 512 x 1408, and this runs only once
    left, singular_values, right = torch.linalg.svd(effective.double(), full_matrices=False)
    largest = singular_values[:, :1]
    relative = singular_values / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    roots = smallest_root(method.level.map, relative)
    roots[:, 0] = 1.0
    raw = left * (largest * roots)[:, None, :] @ right
    return raw.to(effective.dtype), left[:, :, 0].to(effective.dtype), right[:, 0].to(effective.dtype)


def require_invertible(method: Method) -> None:
    """Raise a `UserError` with the reason if `invert` cannot work."""
    at_one = maps.evaluate(method.level.map, 1.0)
    if abs(at_one - 1.0) > TOLERANCE:
        raise UserError(
            f"given weights can be preserved only if g(1) = 1, but level {method.level.name} has {at_one:.6g}; "
            + USE_AS_W
        )
    if not method.config.norm_recovery:
        raise UserError(
            f"given weights can be preserved only with norm_recovery, without which PC(W) has norm 1; or {USE_AS_W}"
        )


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
