"""What the runs of a sweep have come to: their states, and the final numbers of those that finished."""

import itertools
import json
import math

from pc.common.files import write_atomically
from pc.common.run_folder import Series, read_log, state_of
from pc.launch.run import Run
from pc.sweep.spec import Selection, Sweep
from pc.titan.metrics import LossSpikes


def status_text(sweep: Sweep) -> str:
    """A line for each run, and how many there are of each state."""
    lines = []
    counts: dict[str, int] = {}
    for run in sweep.runs:
        state = state_of(run.folder)
        progress = f"{state.step}/{state.steps}" if state.steps else ""
        reason = f"taken over from {run.folder.readlink()}" if run.folder.is_symlink() else state.reason
        lines.append(f"{run.name:<44} {state.state:<12} {progress:>15}  {reason}".rstrip())
        counts[state.state] = counts.get(state.state, 0) + 1
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items()))
    return "\n".join(lines)


def count_spikes(losses: Series, selection: Selection) -> int:
    """Spikes of the logged losses, by the trainer's own rule with the sweep's settings."""
    spikes = LossSpikes(
        selection.spike_window, selection.spike_deviations, selection.spike_margin, selection.spike_warmup
    )
    for step, loss in zip(losses.steps, losses.values, strict=True):
        spikes.update(step, loss)
    return spikes.count


def steps_between(losses: Series) -> int:
    """The longest way between two logged losses: a spike that is shorter can have been missed."""
    return max((after - before for before, after in itertools.pairwise(losses.steps)), default=1)


def result_of(run: Run, selection: Selection) -> dict | None:
    """The final numbers of a finished run as one JSON line; None for any other."""
    state = state_of(run.folder)
    if state.state != "finished":
        return None
    log = read_log(run.folder)
    losses = log.series("loss")
    return {
        "name": run.name,
        "config": run.config,
        "settings": run.settings,
        "seed": run.seed,
        "steps": state.steps,
        "tokens": losses.tokens[-1] if losses.steps else None,
        "loss": _last(losses),
        selection.metric: _last(log.series(selection.metric)),
        "spikes": count_spikes(losses, selection),
        "steps_between_losses": steps_between(losses),
        "folder": str(run.folder),
    }


def _last(series: Series) -> float | None:
    """The last value; None if there is none, or it is not finite, which JSON does not have."""
    return series.values[-1] if series.values and math.isfinite(series.values[-1]) else None


def collect(sweep: Sweep) -> list[dict]:
    """Write results.jsonl, one line per finished run, and return it.

    It is made anew from the run folders each time: array tasks that finish together cannot lose lines.
    """
    results = [result for run in sweep.runs if (result := result_of(run, sweep.select)) is not None]
    lines = "".join(json.dumps(result) + "\n" for result in results)
    write_atomically(sweep.folder / "results.jsonl", lines)
    return results
