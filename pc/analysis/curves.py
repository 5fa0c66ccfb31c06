"""Validation loss against tokens, and how many fewer tokens one run needs than another."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pc.common.files import write_atomically
from pc.common.plots import save, short_tokens, subplots
from pc.common.run_folder import RunLog, Series

VALIDATION = "validation_loss"
_REMEDY = "turn validation on with [validation] enable = true and a freq below the number of steps"


@dataclass(frozen=True)
class Comparison:
    """One row of the summary: a run beside the reference, which is the first run given."""

    name: str
    steps: int
    tokens: int
    final_loss: float
    difference: float
    """Final loss minus the reference's; negative is better."""
    reached_at_tokens: float | None
    """Tokens after which the run reaches the reference's final loss; None if it never does."""
    speedup: float | None
    """How many times fewer tokens than the other the better of the two needs for the worse one's final
    loss: above 1 this run is the faster, below 1 the reference is. None if neither gets there."""


def tokens_to_reach(series: Series, loss: float) -> float | None:
    """Tokens at which the curve first comes down to `loss`, linear between neighbouring validations.

    None if no validation is that low. A first validation that is already that low gives its own tokens,
    since nothing is known before it.
    """
    for i, value in enumerate(series.values):
        if value <= loss:
            if i == 0:
                return float(series.tokens[0])
            before, drop = series.tokens[i - 1], series.values[i - 1] - value
            share = (series.values[i - 1] - loss) / drop
            return before + share * (series.tokens[i] - before)
    return None


def compare(runs: Sequence[RunLog]) -> list[Comparison]:
    """Every run against the first."""
    reference = runs[0].require(VALIDATION, _REMEDY)
    rows = []
    for run in runs:
        series = run.require(VALIDATION, _REMEDY)
        reached = tokens_to_reach(series, reference.values[-1])
        speedup = None
        if run is runs[0]:
            reached, speedup = float(reference.tokens[-1]), 1.0
        elif reached is not None:
            speedup = reference.tokens[-1] / reached
        else:
            reference_reached = tokens_to_reach(reference, series.values[-1])
            if reference_reached is not None:
                speedup = reference_reached / series.tokens[-1]
        rows.append(
            Comparison(
                name=run.name,
                steps=series.steps[-1],
                tokens=series.tokens[-1],
                final_loss=series.values[-1],
                difference=series.values[-1] - reference.values[-1],
                reached_at_tokens=reached,
                speedup=speedup,
            )
        )
    return rows


def table(rows: Sequence[Comparison]) -> str:
    """The rows as a Markdown table, with what the reader must know to judge it below."""
    reference = rows[0]
    text = [
        "| run | steps | tokens | final validation loss | difference | "
        f"reaches {reference.final_loss:.4f} after | speedup in tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        reached = "never" if row.reached_at_tokens is None else short_tokens(row.reached_at_tokens)
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        text.append(
            f"| {row.name} | {row.steps:,} | {short_tokens(row.tokens)} | {row.final_loss:.4f} | "
            f"{row.difference:+.4f} | {reached} | {speedup} |"
        )
    text.append("")
    text.append(
        f"Difference and speedup are against {reference.name}. Between two validations the loss is taken as "
        "linear in tokens. A speedup below 1 means that the reference needs fewer tokens for this run's "
        "final loss."
    )
    if any(row.tokens != reference.tokens for row in rows):
        text.append(
            "The runs saw different numbers of tokens: each final loss is at the run's own end, and with "
            "learning rates that decay to the end the speedup is not a fair comparison."
        )
    return "\n".join(text) + "\n"


def plot_validation(runs: Sequence[RunLog], output: Path) -> list[Path]:
    """Validation loss against tokens; where a run reaches the reference's final loss is marked."""
    figure, axes = subplots(width=5.0, height=3.4)
    rows = compare(runs)
    for i, (run, row) in enumerate(zip(runs, rows, strict=True)):
        series = run.series(VALIDATION)
        axes.plot(series.tokens, series.values, color=f"C{i}", marker=".", markersize=3, label=run.name)
        if i > 0 and row.reached_at_tokens is not None:
            axes.plot(
                row.reached_at_tokens,
                rows[0].final_loss,
                "o",
                color=f"C{i}",
                markerfacecolor="white",
                zorder=3,
            )
            axes.annotate(
                f"{row.speedup:.2f}x fewer tokens" if row.speedup >= 1 else f"{row.speedup:.2f}x",
                (row.reached_at_tokens, rows[0].final_loss),
                textcoords="offset points",
                xytext=(-4, -12 - 11 * (i - 1)),
                ha="right",
                color=f"C{i}",
                fontsize=8,
            )
    every = [run.series(VALIDATION) for run in runs]
    early = max(series.tokens[-1] for series in every) / 10
    shown = [v for s in every for t, v in zip(s.tokens, s.values, strict=True) if t >= early and math.isfinite(v)]
    if len(shown) > 1 and max(shown) > min(shown):  # the first tenth falls so far that it would hide the rest
        height = max(shown) - min(shown)
        axes.set_ylim(min(shown) - 0.15 * height, max(shown) + 0.1 * height)
    axes.axhline(rows[0].final_loss, color="C0", linestyle=":", linewidth=1)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("validation loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda value, _: short_tokens(value))
    axes.legend()
    return save(figure, output / "validation_loss")


def write_comparison(runs: Sequence[RunLog], output: Path) -> list[Path]:
    """Figure, `summary.md` and `summary.json` of two or more runs."""
    rows = compare(runs)
    write_atomically(output / "summary.md", table(rows))
    write_atomically(output / "summary.json", json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return [*plot_validation(runs, output), output / "summary.md", output / "summary.json"]
