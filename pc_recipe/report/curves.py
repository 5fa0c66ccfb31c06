"""Validation loss against tokens, and how many fewer tokens one run needs than another."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from pc_recipe.files import markdown
from pc_recipe.files.plots import label_tokens, save, short_tokens, subplots
from pc_recipe.files.run_log import RunLog
from pc_recipe.runs.sweep.spec import VALIDATION

_REMEDY = "turn validation on with [validation] enable = true and a freq below the number of steps"


def tokens_to_reach(curve: pd.Series, loss: float) -> float:
    """Tokens at which a validation loss by tokens first reaches `loss`, linear between neighbouring validations.

    NaN if no validation is that low. If the first validation is already that low, or the one before is not finite, its
    own tokens, because nothing is known before it.
    """
    low = np.flatnonzero(curve <= loss)
    if not low.size:
        return math.nan
    known = curve.iloc[max(0, low[0] - 1) : low[0] + 1]
    known = known[np.isfinite(known)][::-1]  # from the lower loss to the one before, as `interp` needs it
    return float(np.interp(loss, known.values, known.index))


def speedup(reference: pd.Series, curve: pd.Series) -> float:
    """How many times fewer tokens a run needs than the reference, by their validation losses by tokens.

    Above 1: the run reached the reference's final loss with so many times fewer tokens. Below 1: it never did, and the
    reference reached the run's final loss with this fraction of the run's tokens. NaN: neither happened; the run may
    only have ended early.
    """
    reached = tokens_to_reach(curve, reference.iloc[-1])
    if not math.isnan(reached):
        return reference.index[-1] / reached
    fraction = tokens_to_reach(reference, curve.iloc[-1]) / curve.index[-1]
    return fraction if fraction < 1 else math.nan


def compare(runs: Sequence[RunLog]) -> pd.DataFrame:
    """Compare every run with the first.

    `difference` is the final loss minus the reference's, so negative is better; `reached_at_tokens` is where the run
    reaches the reference's final loss, NaN if it never does; `speedup` as by `speedup`.
    """
    curves = [run.series(VALIDATION, "tokens", _REMEDY) for run in runs]
    final = curves[0].iloc[-1]
    rows = []
    for run, curve in zip(runs, curves, strict=True):
        row = {"name": run.name, "steps": run.series(VALIDATION).index[-1], "tokens": curve.index[-1]}
        row |= {"final_loss": curve.iloc[-1], "difference": curve.iloc[-1] - final}
        # the reference may have had its final loss before, but the others are measured at its end
        row["reached_at_tokens"] = float(row["tokens"]) if run is runs[0] else tokens_to_reach(curve, final)
        row["speedup"] = 1.0 if run is runs[0] else speedup(curves[0], curve)
        rows.append(row)
    return pd.DataFrame(rows)


def table(rows: pd.DataFrame) -> str:
    """The rows as a Markdown table, with notes below."""
    reference = rows.iloc[0]
    lines = []
    for row in rows.itertuples():
        reached = "never" if math.isnan(row.reached_at_tokens) else short_tokens(row.reached_at_tokens)
        faster = "-" if math.isnan(row.speedup) else f"{row.speedup:.2f}x"
        losses = [f"{row.final_loss:.4f}", f"{row.difference:+.4f}"]
        lines.append([row.name, f"{row.steps:,}", short_tokens(row.tokens), *losses, reached, faster])
    header = ["run", "steps", "tokens", "final validation loss", "difference"]
    text = markdown.table([*header, f"reaches {reference.final_loss:.4f} after", "speedup in tokens"], lines) + (
        f"\nDifference and speedup are against {reference['name']}. Between two validations the loss is interpolated "
        "linearly in tokens. A speedup below 1 means that the reference needs fewer tokens for this run's final loss.\n"
    )
    if rows.tokens.nunique() > 1:
        text += (
            "The runs saw different numbers of tokens: each final loss is at the run's own end, and with "
            "learning rates that decay to the end the speedup is not a fair comparison.\n"
        )
    return text


def plot(runs: Sequence[RunLog], rows: pd.DataFrame, output: Path) -> Path:
    """Validation loss against tokens; a mark shows where another run reaches the reference's final loss."""
    figure, axes = subplots(width=5.0, height=3.4)
    final = rows.final_loss[0]
    shown: list[float] = []
    for i, run in enumerate(runs):
        curve = run.series(VALIDATION, "tokens")
        label = run.name if math.isnan(rows.speedup[i]) or i == 0 else f"{run.name}, {rows.speedup[i]:.2f}x"
        axes.plot(curve.index, curve, color=f"C{i}", marker=".", markersize=3, label=label)
        if i > 0:
            axes.plot(rows.reached_at_tokens[i], final, "o", color=f"C{i}", markerfacecolor="white", zorder=3)
        shown += filter(math.isfinite, curve[curve.index >= rows.tokens.max() / 10])
    if shown and max(shown) > min(shown):  # the first tenth falls so far that the rest would be hard to see
        height = max(shown) - min(shown)
        axes.set_ylim(min(shown) - 0.15 * height, max(shown) + 0.1 * height)
    axes.axhline(final, color="C0", linestyle=":", linewidth=1)
    label_tokens(axes)
    axes.set_ylabel("validation loss (nats per token)")
    axes.legend()
    return save(figure, output / "validation_loss")
