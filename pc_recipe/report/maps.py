"""Plots and tables of the maps that PC applies to singular values."""

from pathlib import Path

import torch
from torch import Tensor

import pc.maps
from pc.errors import UserError
from pc_recipe.pages import markdown
from pc_recipe.pages.plots import save, subplots

INTERVAL = (0.0, 1.1)

# Paper, table 1: the cutoff b of the piecewise-linear target min(sigma / b, 1) that each level is fitted to.
CUTOFFS: dict[int, float] = {1: 0.8, 2: 0.6, 3: 0.4, 4: 0.3}

Maps = dict[str, tuple[pc.maps.Map, float]]
"""{name: (map, the cutoff of its target)}."""

LEVELS: Maps = {f"level {level}": (pc.maps.LEVELS[level], cutoff) for level, cutoff in CUTOFFS.items()}
POLAR_EXPRESS: Maps = {"Polar Express": (pc.maps.POLAR_EXPRESS, 1e-3)}


def target(cutoff: float, sigma: Tensor) -> Tensor:
    """The piecewise-linear target `min(sigma / cutoff, 1)` (paper, section 3.2)."""
    return (sigma / cutoff).clamp(max=1.0)


def fit(cutoff: float, degree: int, alpha: float = 4.0) -> pc.maps.Coefficients:
    """Fit `sigma * p(sigma^2)` to `target(cutoff)` on [0, 1.1] by weighted least squares, with g(1) = 1 (paper,
    equation 2, appendix).

    The paper samples at random. This samples a fine regular grid, which makes the result deterministic: the
    limit of the paper's procedure.

    Args:
        cutoff: b in (0, 1], above which the target is 1.
        degree: degree of `p`, at least 1; the level k of the paper.
        alpha: the error at sigma has weight sigma^alpha.

    Returns:
        `degree + 1` coefficients of `p` from degree 0 up.

    Raises:
        UserError: a cutoff outside its range.
    """
    if not 0.0 < cutoff <= 1.0:
        raise UserError(f"cutoff must be in (0, 1], got {cutoff}")
    points = 20_000
    sigma = INTERVAL[1] * (torch.arange(points, dtype=torch.float64) + 0.5) / points
    powers = torch.stack([sigma ** (2 * i + 1) for i in range(degree + 1)], dim=1)
    # g(1) = 1 makes a_0 = 1 - a_1 - ... - a_k, so the other coefficients are free
    powers, values = powers[:, 1:] - powers[:, :1], target(cutoff, sigma) - sigma
    root_weight = sigma ** (alpha / 2)
    solution = torch.linalg.lstsq(powers * root_weight[:, None], (values * root_weight)[:, None]).solution[:, 0]
    others = solution.tolist()
    return 1.0 - sum(others), *others


def plot(output: Path, own: Maps) -> Path:
    """The targets, the fitted maps of levels 1 to 4, and Polar Express; also `own` fits."""
    sigma = torch.linspace(*INTERVAL, 1_000, dtype=torch.float64)
    figure, (targets, maps, flattening) = subplots(1, 3, width=3.6)
    colors = {name: f"C{i}" for i, name in enumerate(LEVELS | POLAR_EXPRESS | own)}
    for name, (map, cutoff) in (LEVELS | own).items():
        targets.plot(sigma, target(cutoff, sigma), color=colors[name], label=f"b = {cutoff}")
        maps.plot(sigma, pc.maps.evaluate(map, sigma), color=colors[name], label=name)
    for name, (map, _) in ({"level 4": LEVELS["level 4"]} | POLAR_EXPRESS).items():
        flattening.plot(sigma, pc.maps.evaluate(map, sigma), color=colors[name], label=name)
    for axes, title in zip((targets, maps, flattening), ("Targets", "Fitted maps", "Over-flattening"), strict=True):
        axes.set_title(title)
        axes.set_xlabel(r"singular value $\sigma$ (after normalisation)")
        axes.set_ylabel(r"$g(\sigma)$")
        axes.legend(loc="lower right", frameon=False)
    return save(figure, output / "polynomials")


def table(own: Maps) -> str:
    """One line per map, measured on (0, 1.1] against the target of its cutoff; also `own` fits.

    The last column is the root mean square error with weight sigma^4, as in the paper's fit.
    """
    sigma = torch.linspace(*INTERVAL, 20_001, dtype=torch.float64)[1:]
    weight = sigma**4 / (sigma**4).sum()
    lines = []
    for name, (map, cutoff) in (LEVELS | POLAR_EXPRESS | own).items():
        stages = pc.maps.stages(map)
        shown = ", ".join(f"{a:.4g}" for a in stages[0]) if len(stages) == 1 else f"{len(stages)} quintics"
        value = pc.maps.evaluate(map, sigma)
        error = (weight * (value - target(cutoff, sigma)).square()).sum().sqrt()
        lines.append([name, shown, f"{(value / sigma).max():.3f}", f"{value.max():.4f}", f"{error:.4f}"])
    header = "map|p, degree 0 up|largest amplification|largest value|RMS error, weight sigma^4"
    return markdown.table(header.split("|"), lines)
