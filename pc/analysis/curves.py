"""Validation loss against tokens, and how many fewer tokens one run needs than another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pc.common import markdown
from pc.common.plots import label_tokens, save, short_tokens, subplots
from pc.common.run_folder import RunLog, Series

VALIDATION = "validation_loss"
_REMEDY = "turn validation on with [validation] enable = true and a freq below the number of steps"


@dataclass(frozen=True)
class Comparison:
    """One row of the summary: a run compared with the reference, the first run given."""

    name: str
    steps: int
    tokens: int
    final_loss: float
    difference: float
    """Final loss minus the reference's; negative is better."""
    reached_at_tokens: float | None
    """Tokens at which the run reaches the reference's final loss; None if it never does."""
    speedup: float | None
    """Above 1: the run reached the reference's final loss with so many times fewer tokens. Below 1: it never did, and the
    reference reached the run's final loss with this fraction of the run's tokens. None: neither happened; the run may
    only have ended early."""


def tokens_to_reach(series: Series, loss: float) -> float | None:
    """Tokens at which the curve first reaches `loss`, linear between neighbouring validations.

    None if no validation is that low. If the first validation is already that low, or the one before is not finite, its
    own tokens, because nothing is known before it.
    """
    for i, value in enumerate(series.values):
        if value <= loss:
            if i == 0 or not math.isfinite(series.values[i - 1]):
                return float(series.tokens[i])
            before, higher = series.tokens[i - 1], series.values[i - 1]
            return before + (higher - loss) / (higher - value) * (series.tokens[i] - before)
    return None


def compare(runs: Sequence[RunLog]) -> list[Comparison]:
    """Compare every run with the first."""
    reference = runs[0].require(VALIDATION, _REMEDY)
    rows = []
    for run in runs:
        series = run.require(VALIDATION, _REMEDY)
        tokens, final = series.tokens[-1], series.values[-1]
        reached = float(tokens) if run is runs[0] else tokens_to_reach(series, reference.values[-1])
        speedup = _speedup(reference, series, reached)
        difference = final - reference.values[-1]
        rows.append(Comparison(run.name, series.steps[-1], tokens, final, difference, reached, speedup))
    return rows


def _speedup(reference: Series, run: Series, reached: float | None) -> float | None:
    if reached is not None:
        return reference.tokens[-1] / reached
    by_reference = tokens_to_reach(reference, run.values[-1])
    return by_reference / run.tokens[-1] if by_reference is not None and by_reference < run.tokens[-1] else None


def table(rows: Sequence[Comparison]) -> str:
    """The rows as a Markdown table, with notes below."""
    reference = rows[0]
    lines = []
    for row in rows:
        reached = "never" if row.reached_at_tokens is None else short_tokens(row.reached_at_tokens)
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        losses = [f"{row.final_loss:.4f}", f"{row.difference:+.4f}"]
        lines.append([row.name, f"{row.steps:,}", short_tokens(row.tokens), *losses, reached, speedup])
    header = ["run", "steps", "tokens", "final validation loss", "difference"]
    text = markdown.table([*header, f"reaches {reference.final_loss:.4f} after", "speedup in tokens"], lines) + (
        f"\nDifference and speedup are against {reference.name}. Between two validations the loss is interpolated "
        "linearly in tokens. A speedup below 1 means that the reference needs fewer tokens for this run's final loss.\n"
    )
    if any(row.tokens != reference.tokens for row in rows):
        text += (
            "The runs saw different numbers of tokens: each final loss is at the run's own end, and with "
            "learning rates that decay to the end the speedup is not a fair comparison.\n"
        )
    return text


def plot(runs: Sequence[RunLog], rows: Sequence[Comparison], output: Path) -> Path:
    """Validation loss against tokens; a mark shows where a run reaches the reference's final loss."""
    figure, axes = subplots(width=5.0, height=3.4)
    for i, (run, row) in enumerate(zip(runs, rows, strict=True)):
        series = run.series(VALIDATION)
        axes.plot(series.tokens, series.values, color=f"C{i}", marker=".", markersize=3, label=run.name)
        if i > 0 and row.reached_at_tokens is not None:
            place = (row.reached_at_tokens, rows[0].final_loss)
            axes.plot(*place, "o", color=f"C{i}", markerfacecolor="white", zorder=3)
            axes.annotate(
                f"{row.speedup:.2f}x fewer tokens" if row.speedup >= 1 else f"{row.speedup:.2f}x",
                place,
                textcoords="offset points",
                xytext=(-4, -12 - 11 * (i - 1)),
                ha="right",
                color=f"C{i}",
                fontsize=8,
            )
    every = [run.series(VALIDATION) for run in runs]
    early = max(series.tokens[-1] for series in every) / 10
    shown = [v for s in every for t, v in zip(s.tokens, s.values, strict=True) if t >= early and math.isfinite(v)]
    if len(shown) > 1 and max(shown) > min(shown):  # the first tenth falls so far that the rest would be hard to see
        height = max(shown) - min(shown)
        axes.set_ylim(min(shown) - 0.15 * height, max(shown) + 0.1 * height)
    axes.axhline(rows[0].final_loss, color="C0", linestyle=":", linewidth=1)
    label_tokens(axes)
    axes.set_ylabel("validation loss (nats per token)")
    axes.legend()
    return save(figure, output / "validation_loss")
