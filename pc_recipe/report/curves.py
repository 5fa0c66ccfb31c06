"""Losses against tokens and time, and how many fewer tokens one run needs than another."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from pc_recipe.config import read_config
from pc_recipe.files.run_folder import read_environment, read_state
from pc_recipe.files.run_log import BITS_PER_BYTE, VALIDATION, RunLog
from pc_recipe.pages.plots import label_tokens, short_tokens
from pc_recipe.report import settings
from pc_recipe.runs.comparable import TEXT, find_others, require_same_text

FINISHED = "finished", "waiting"
"""States of a run that has all its steps, as far as is known: a "waiting" run has no status.json."""
_REMEDY = "turn validation on with [validation] enable = true and a freq below the number of steps"


def unit(runs: Sequence[RunLog]) -> tuple[str, str]:
    """The logged metric by which runs are compared, and its unit: bits per byte, if every validation of each has
    them; a run that an earlier version began lacks the first ones."""
    if all(len(run.series(BITS_PER_BYTE)) == len(run.series(VALIDATION)) > 0 for run in runs):
        return BITS_PER_BYTE, "bits per byte"
    return VALIDATION, "nats per token"


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

    Above 1: the run reached the reference's final loss with so many times fewer tokens than the reference, which may have
    reached it before its end. Below 1: it did so with more; or it never did, and the reference reached
    the run's final loss with this fraction of the run's tokens. NaN: neither happened; the run may only have ended early.
    """
    final = reference.iloc[-1]
    reached = tokens_to_reach(curve, final)
    if not math.isnan(reached):
        return tokens_to_reach(reference, final) / reached
    fraction = tokens_to_reach(reference, curve.iloc[-1]) / curve.index[-1]
    return fraction if fraction < 1 else math.nan


def compare(runs: Sequence[RunLog]) -> pd.DataFrame:
    """Compare every run with the first.

    `difference` is the final loss minus the reference's, both in `unit`, so negative is better; `reached_at_tokens` is where
    the run reaches the reference's final loss, NaN if it never does; `speedup` as by `speedup`. `apart` says why these are not
    known; "" if they are.
    """
    curves = [run.series(unit(runs)[0], "tokens", _REMEDY) for run in runs]
    final = curves[0].iloc[-1]
    rows = []
    for run, curve in zip(runs, curves, strict=True):
        validated = run.series(VALIDATION)
        row = {"name": run.name, "steps": validated.index[-1], "tokens": curve.index[-1], "nats": validated.iloc[-1]}
        row |= {"final_loss": curve.iloc[-1], "difference": curve.iloc[-1] - final}
        row |= {"reached_at_tokens": tokens_to_reach(curve, final), "speedup": speedup(curves[0], curve)}
        row["apart"] = "" if run is runs[0] else _why_apart(runs[0], run)
        if row["apart"]:
            row |= dict.fromkeys(("difference", "reached_at_tokens", "speedup"), math.nan)
        rows.append(row)
    return pd.DataFrame(rows)


def _why_apart(reference: RunLog, run: RunLog) -> str:
    """Why the final losses of two runs are not compared; "" if they are."""
    for one in (run, reference):
        ended = read_state(one.file.parent)
        if ended.state not in FINISHED:
            return f"{one.name} has not finished ({ended.state})"
        if ended.step and one.series(VALIDATION).index[-1] != ended.step:
            return f"{one.name} was not validated at its last step"
    return settings.why_apart(read_config(reference.file.parent), read_config(run.file.parent))


def reached(row: Any) -> str:
    """After how many tokens a row's run reaches the first one's final loss, in words."""
    if row.apart:
        return row.apart
    return "never" if math.isnan(row.reached_at_tokens) else short_tokens(row.reached_at_tokens)


def marked(runs: Sequence[RunLog]) -> list[RunLog]:
    """The runs; the names of those trained on other data than the first say so.

    Raises:
        UserError: a run was validated on other text, or with another tokenizer.
    """
    folders = [run.file.parent for run in runs]
    require_same_text(folders)
    others = find_others(TEXT, folders)
    return [
        replace(run, name=f"{run.name} (other data)") if folder in others else run
        for run, folder in zip(runs, folders, strict=True)
    ]


def draw_validation(axes: Any, runs: Sequence[RunLog], rows: pd.DataFrame) -> None:
    """Validation loss against tokens; a mark shows where another run reaches the reference's final loss."""
    key, words = unit(runs)
    _draw(axes, runs, [run.series(key, "tokens") for run in runs], marker=".", markersize=3)
    for i in range(1, len(runs)):
        axes.plot(rows.reached_at_tokens[i], rows.final_loss[0], "o", color=f"C{i}", markerfacecolor="white", zorder=3)
    axes.axhline(rows.final_loss[0], color="C0", linestyle=":", linewidth=1)
    label_tokens(axes)
    axes.set_ylabel(f"validation loss ({words})")


def draw_training(axes: Any, runs: Sequence[RunLog], by_time: bool = False) -> None:
    """The moving average of the training losses over a 50th of them, against tokens or hours."""
    losses = [_by_hours(run, "loss") if by_time else run.series("loss", "tokens", "training logs it") for run in runs]
    means = [curve.rolling(math.ceil(len(curve) / 50), min_periods=1).mean() for curve in losses]
    _draw(axes, runs, [mean.iloc[:: math.ceil(len(mean) / 500)] for mean in means])
    axes.set_ylabel("training loss (nats per token)")
    if by_time:
        axes.set_xlabel(_label_of_hours(runs))
    else:
        label_tokens(axes)


def draw_validation_over_time(axes: Any, runs: Sequence[RunLog]) -> None:
    """Validation loss against the hours of the training steps."""
    key, words = unit(runs)
    _draw(axes, runs, [_by_hours(run, key) for run in runs], marker=".", markersize=3)
    axes.set_xlabel(_label_of_hours(runs))
    axes.set_ylabel(f"validation loss ({words})")


def _draw(axes: Any, runs: Sequence[RunLog], curves: Sequence[pd.Series], **style: Any) -> None:
    for i, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        axes.plot(curve.index, curve, color=f"C{i}", label=run.name, **style)
    _leave_out_the_start(axes, curves)


def _by_hours(run: RunLog, key: str) -> pd.Series:
    """What is logged under `key`, by the hours that the steps so far took, without validation, checkpoints and pauses."""
    hours = run.seconds("time is drawn for runs that log it") / 3600
    curve = run.series(key)
    return curve.set_axis(np.interp(curve.index, hours.index, hours))


def _label_of_hours(runs: Sequence[RunLog]) -> str:
    machines = [
        [environment.get(key) for key in ("gpus", "cpu_cores", "world_size")]
        for environment in (read_environment(run.file.parent) for run in runs)
    ]
    return "hours of training steps" + (", on different machines" if any(m != machines[0] for m in machines) else "")


def _leave_out_the_start(axes, curves: Sequence[pd.Series]) -> None:
    """The first tenth falls so far that the rest would be hard to see."""
    begin = max(curve.index[-1] for curve in curves) / 10
    shown = [loss for curve in curves for loss in curve[curve.index >= begin] if math.isfinite(loss)]
    if shown and max(shown) > min(shown):
        height = max(shown) - min(shown)
        axes.set_ylim(min(shown) - 0.15 * height, max(shown) + 0.1 * height)
