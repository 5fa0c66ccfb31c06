"""Plots and tables of the maps that PC applies to singular values."""

from pathlib import Path

import torch
from torch import Tensor

from pc import polynomial
from pc.common import markdown
from pc.common.plots import save, subplots
from pc.errors import UserError

INTERVAL = (0.0, 1.1)


# Paper, table 1: the cutoff b of the piecewise-linear target min(sigma / b, 1) that each level is fitted to.
CUTOFFS: dict[int, float] = {1: 0.8, 2: 0.6, 3: 0.4, 4: 0.3}


def target(cutoff: float, sigma: Tensor) -> Tensor:
    """The piecewise-linear target `min(sigma / cutoff, 1)` (paper, section 3.2)."""
    return (sigma / cutoff).clamp(max=1.0)


def fit(cutoff: float, degree: int, alpha: float = 4.0) -> polynomial.Coefficients:
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


def plot(output: Path, own: polynomial.Coefficients | None = None, cutoff: float = 1.0) -> Path:
    """The targets, the fitted maps of levels 1 to 4, and Polar Express; also an `own` fit to the target of `cutoff`."""
    sigma = torch.linspace(*INTERVAL, 1_000, dtype=torch.float64)
    figure, (targets, maps, flattening) = subplots(1, 3, width=3.6)
    for level, b in CUTOFFS.items():
        targets.plot(sigma, target(b, sigma), label=f"b = {b}")
        maps.plot(sigma, polynomial.evaluate(polynomial.resolve(level), sigma), label=f"level {level}")
    if own is not None:
        targets.plot(sigma, target(cutoff, sigma), "k--", label=f"b = {cutoff}, your own")
        maps.plot(sigma, polynomial.evaluate(own, sigma), "k--", label=f"your own, degree {len(own) - 1}")
    flattening.plot(sigma, polynomial.evaluate(polynomial.resolve(4), sigma), color="C3", label="level 4")
    flattening.plot(sigma, polynomial.evaluate(polynomial.POLAR_EXPRESS, sigma), color="C4", label="Polar Express")
    for axes, title in zip((targets, maps, flattening), ("Targets", "Fitted maps", "Over-flattening"), strict=True):
        axes.set_title(title)
        axes.set_xlabel(r"singular value $\sigma$ (after normalisation)")
        axes.set_ylabel(r"$g(\sigma)$")
        axes.legend(loc="lower right")
    return save(figure, output / "polynomials")


def table(own: polynomial.Coefficients | None = None, cutoff: float = 1.0) -> str:
    """One line per map, measured on (0, 1.1] against the target of its cutoff; also an `own` fit to that of `cutoff`.

    The last column is the root mean square error with weight sigma^4, as in the paper's fit.
    """
    rows: dict[str, tuple[polynomial.Map, float]] = {
        f"level {k}": (polynomial.resolve(k), b) for k, b in CUTOFFS.items()
    }
    rows["Polar Express"] = (polynomial.POLAR_EXPRESS, 1e-3)
    if own is not None:
        rows["own fit"] = (own, cutoff)
    sigma = torch.linspace(*INTERVAL, 20_001, dtype=torch.float64)[1:]
    weight = sigma**4 / (sigma**4).sum()
    lines = []
    for name, (map, b) in rows.items():
        stages = polynomial.stages(map)
        shown = ", ".join(f"{a:.4g}" for a in stages[0]) if len(stages) == 1 else f"{len(stages)} quintics"
        value = polynomial.evaluate(map, sigma)
        error = value - target(b, sigma)
        at_one = polynomial.evaluate(map, torch.ones(1, dtype=torch.float64)).item()
        numbers = [value.max(), error.abs().max(), (weight * error.square()).sum().sqrt()]
        lines.append([name, shown, f"{at_one:.4f}", f"{(value / sigma).max():.3f}", *(f"{x:.4f}" for x in numbers)])
    words = "map|p, degree 0 up|g(1)|largest amplification|largest value|largest error|RMS error, weight sigma^4"
    return markdown.table(words.split("|"), lines)
