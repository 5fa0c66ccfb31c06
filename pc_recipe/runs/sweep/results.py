"""Results of a sweep: the state of its runs, and the final figures of those that finished or diverged."""

import json
import math
from collections import Counter

import pandas as pd

from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.run_folder import read_state
from pc_recipe.files.run_log import VALIDATION, read_log
from pc_recipe.runs.run import Run
from pc_recipe.runs.sweep.spec import Sweep
from pc_recipe.train.loss_spikes import LossSpikes


def describe_status(sweep: Sweep) -> str:
    """A line for each run, and the number of runs in each state."""
    lines = []
    counts: Counter[str] = Counter()
    for run in sweep.runs:
        state = read_state(run.folder)
        progress = f"{state.step}/{state.steps}" if state.steps else ""
        reason = f"reused from {run.folder.readlink()}" if run.folder.is_symlink() else state.reason
        lines.append(f"{run.name:<44} {state.state:<12} {progress:>15}  {reason}".rstrip())
        counts[state.state] += 1
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items()))
    return "\n".join(lines)


def read_result(run: Run) -> dict | None:
    """The final figures of a finished run, for one JSON line; None for a run that may still finish.

    A run that diverged has no validation loss: those from before it diverged are not final.
    """
    state = read_state(run.folder)
    if state.state not in ("finished", "diverged"):
        return None
    log = read_log(run.folder)
    validated = log.series(VALIDATION)
    losses, spikes = log.series("loss"), LossSpikes()
    for step, loss in losses.items():
        spikes.update(step, loss)
    return {
        "name": run.name,
        "state": state.state,
        "config": run.config,
        "settings": run.settings,
        "variant": run.variant,
        "seed": run.seed,
        "steps": state.steps,
        "tokens": max((line["tokens"] for line in log.lines), default=None),
        "loss": _last(losses),
        # if a crash lost the log's end, the last one is of an earlier step, not final
        VALIDATION: _last(validated[validated.index == state.step]) if state.state == "finished" else None,
        "spikes": spikes.known,
        "folder": str(run.folder),
    }


def _last(series: pd.Series) -> float | None:
    """The last value; None if there is none or it is not finite, which JSON cannot represent."""
    return next(filter(math.isfinite, series.tail(1)), None)


def collect(sweep: Sweep) -> list[dict]:
    """Write results.jsonl, one line per finished or diverged run, and return its content.

    It is rebuilt from the run folders each time, so that several commands on one sweep cannot lose lines.
    """
    results = [result for run in sweep.runs if (result := read_result(run)) is not None]
    lines = "".join(json.dumps(result) + "\n" for result in results)
    write_atomically(sweep.folder / "results.jsonl", lines)
    return results
