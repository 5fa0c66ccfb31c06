"""What `[diagnostics]` logs, drawn against steps: sizes of outputs, errors of the estimate of the largest singular value."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.ticker import NullFormatter

from pc.errors import UserError
from pc_recipe.files.run_log import RunLog
from pc_recipe.report.spectra import BLOCK_TITLES

_ERROR = "spectra/estimate_error/"


def panels(runs: Sequence[RunLog]) -> dict[str, Callable[[Any], None]]:
    """{title: what draws it in axes, or raises a `UserError` that says what to log}"""
    logged = {key.split("/")[2] for run in runs for key in run.keys() if key.startswith(_ERROR)}
    drawn: dict[str, Callable[[Any], None]] = {
        f"{title} output, RMS, mean over layers": partial(_draw_rms, runs=runs, part=part)
        for part, title in (("attention", "Attention"), ("ffn", "FFN"))
    }
    return drawn | {
        f"Error of the spectral norm's estimate: {block}": partial(_draw_error, runs=runs, block=block)
        for block in BLOCK_TITLES
        if block in logged
    }


def _draw_rms(axes: Any, runs: Sequence[RunLog], part: str) -> None:
    """RMS of attention or FFN outputs before the residual addition."""
    for i, run in enumerate(runs):
        layers = [run.series(key) for key in run.keys() if key.startswith(f"signal/{part}/rms/")]
        if not layers:
            raise UserError(f"{run.file}: no sizes of outputs were logged; set [diagnostics] freq above 0")
        mean = pd.DataFrame(layers).mean()
        axes.plot(mean.index, mean, color=f"C{i}", label=run.name)
    axes.set_xlabel("step")
    axes.set_ylabel("RMS")


def _draw_error(axes: Any, runs: Sequence[RunLog], block: str) -> None:
    """Relative error over the layers: median and maximum."""
    for i, run in enumerate(runs):
        for statistic, style in (("median", "-"), ("max", "--")):
            series = run.series(f"{_ERROR}{block}/{statistic}")
            # An estimate can be exact to the last bit, but the logarithmic axis has no zero.
            values, label = series.clip(lower=1e-9), f"{run.name}, {statistic}" if len(series) else None
            axes.plot(series.index, values, style, marker=".", color=f"C{i}", label=label)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # no mathtext, which a page cannot draw
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("relative error")
