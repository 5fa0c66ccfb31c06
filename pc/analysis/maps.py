"""Plots and tables of the maps that PC applies to singular values."""

from pathlib import Path

import torch

from pc import polynomial
from pc.common import markdown
from pc.common.plots import save, subplots
from pc.config import PCConfig
from pc.errors import UserError

INTERVAL = (0.0, 1.1)


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
    """One line per map: {name: (map, cutoff b of its target min(sigma / b, 1))}, measured on (0, 1.1].

    The last column is the root mean square error with weight sigma^4, as in the paper's fit.
    """
    sigma = torch.linspace(*INTERVAL, 20_001, dtype=torch.float64)[1:]
    weight = sigma**4 / (sigma**4).sum()
    lines = []
    for name, (map, cutoff) in rows.items():
        stages = polynomial.stages(map)
        shown = ", ".join(f"{a:.4g}" for a in stages[0]) if len(stages) == 1 else f"{len(stages)} quintics"
        value = polynomial.evaluate(map, sigma)
        error = value - polynomial.target(cutoff, sigma)
        at_one = polynomial.evaluate(map, torch.ones(1, dtype=torch.float64)).item()
        numbers = [value.max(), error.abs().max(), (weight * error.square()).sum().sqrt()]
        lines.append([name, shown, f"{at_one:.4f}", f"{(value / sigma).max():.3f}", *(f"{x:.4f}" for x in numbers)])
    words = "map|p, degree 0 up|g(1)|largest amplification|largest value|largest error|RMS error, weight sigma^4"
    return markdown.table(words.split("|"), lines)


def _finish(axes) -> None:
    axes.set_xlabel(r"singular value $\sigma$ (after normalisation)")
    axes.set_ylabel(r"$g(\sigma)$")
    axes.legend(loc="lower right")
