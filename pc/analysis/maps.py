"""Plots and quality figures of the maps that PC applies to singular values."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pc import polynomial
from pc.common import markdown
from pc.common.plots import save, subplots
from pc.config import PCConfig
from pc.errors import UserError

INTERVAL = (0.0, 1.1)


@dataclass(frozen=True)
class Quality:
    """Quality of a map on [0, 1.1] against the target min(sigma / b, 1)."""

    largest_error: float
    weighted_error: float
    """Root mean square error with weight sigma^4, as in the paper's fit."""
    largest_amplification: float
    """Largest g(sigma) / sigma: how much a small singular value grows. It is `p(0)` for the paper's maps."""
    largest_value: float
    at_one: float


def quality(map: polynomial.Map, cutoff: float) -> Quality:
    """Measure a map on a grid of 20,001 points of [0, 1.1]."""
    sigma = torch.linspace(*INTERVAL, 20_001, dtype=torch.float64)[1:]
    value = polynomial.evaluate(map, sigma)
    error = value - polynomial.target(cutoff, sigma)
    weight = sigma**4
    return Quality(
        largest_error=error.abs().max().item(),
        weighted_error=((weight * error.square()).sum() / weight.sum()).sqrt().item(),
        largest_amplification=(value / sigma).max().item(),
        largest_value=value.max().item(),
        at_one=polynomial.evaluate(map, torch.ones(1, dtype=torch.float64)).item(),
    )


def fit(cutoff: float, degree: int, alpha: float) -> polynomial.Coefficients:
    """`pc.polynomial.fit` for a user's settings; raises UserError."""
    try:
        return polynomial.fit(cutoff, degree, alpha)
    except ValueError as error:
        raise UserError(str(error)) from None


def line_to_paste(coefficients: polynomial.Coefficients) -> str:
    """The line of a config's [pc] section for a map, rounded so that g(1) stays as close to 1.

    Raises:
        UserError: a map that PC refuses.
    """
    rounded = [round(a, 6) for a in coefficients]
    rounded[0] = round(sum(coefficients) - sum(rounded[1:]), 6)
    PCConfig(level=rounded)
    return f"level = [{', '.join(f'{a:.6f}' for a in rounded)}]"


def plot_paper(output: Path) -> Path:
    """The targets, the fitted maps of levels 1 to 4, and Polar Express."""
    sigma = torch.linspace(*INTERVAL, 1_000, dtype=torch.float64)
    figure, (targets, maps, flattening) = subplots(1, 3, width=3.6)
    for level, cutoff in polynomial.CUTOFFS.items():
        color = f"C{level - 1}"
        targets.plot(sigma, polynomial.target(cutoff, sigma), color=color, label=f"b = {cutoff}")
        value = polynomial.evaluate(polynomial.resolve(level), sigma)
        maps.plot(sigma, value, color=color, label=f"level {level}")
    flattening.plot(sigma, polynomial.evaluate(polynomial.resolve(4), sigma), color="C3", label="level 4")
    flattening.plot(sigma, polynomial.evaluate(polynomial.POLAR_EXPRESS, sigma), color="C4", label="Polar Express")
    for axes, title in zip((targets, maps, flattening), ("Targets", "Fitted maps", "Over-flattening"), strict=True):
        axes.set_title(title)
        _finish(axes)
    return save(figure, output / "polynomials")


def plot_fit(coefficients: polynomial.Coefficients, cutoff: float, output: Path) -> Path:
    """A user's own fit with its target."""
    sigma = torch.linspace(*INTERVAL, 1_000, dtype=torch.float64)
    figure, (map_axes, error_axes) = subplots(1, 2, width=3.8)
    target = polynomial.target(cutoff, sigma)
    value = polynomial.evaluate(coefficients, sigma)
    map_axes.plot(sigma, target, "k:", label=f"target, b = {cutoff}")
    map_axes.plot(sigma, value, label=f"fit, degree {len(coefficients) - 1}")
    error_axes.plot(sigma, value - target)
    _finish(map_axes)
    error_axes.set_xlabel(r"singular value $\sigma$ (after normalisation)")
    error_axes.set_ylabel(r"error $g(\sigma) - \mathrm{target}$")
    return save(figure, output / "own_fit")


def table(rows: dict[str, tuple[polynomial.Map, float]]) -> str:
    """One line per map: {name: (map, cutoff of its target)}."""
    lines = []
    for name, (map, cutoff) in rows.items():
        q = quality(map, cutoff)
        stages = polynomial.stages(map)
        shown = ", ".join(f"{a:.4g}" for a in stages[0]) if len(stages) == 1 else f"{len(stages)} quintics"
        errors = [f"{value:.4f}" for value in (q.largest_value, q.largest_error, q.weighted_error)]
        lines.append([name, shown, f"{q.at_one:.4f}", f"{q.largest_amplification:.3f}", *errors])
    words = "map|p, degree 0 up|g(1)|largest amplification|largest value|largest error|RMS error, weight sigma^4"
    return markdown.table(words.split("|"), lines)


def _finish(axes) -> None:
    axes.set_xlabel(r"singular value $\sigma$ (after normalisation)")
    axes.set_ylabel(r"$g(\sigma)$")
    axes.legend(loc="lower right")
