"""The runs of sweeps before they are trained: tokens, GPU-hours and what remains."""

from collections.abc import Sequence

import pandas as pd

from pc_recipe.plan import cost
from pc_recipe.runs.run import Run
from pc_recipe.runs.sweep import equal_runs
from pc_recipe.runs.sweep.spec import Sweep


def table(sweeps: Sequence[Sweep], tflops: float | None, world_size: int) -> str:
    """A line for each run, then sums.

    Args:
        tflops: TFLOP/s of one GPU; None: by the model's width (`cost.assume_tflops`).
    """
    rows, different, waiting = [], [], []
    for group in equal_runs.group_runs(sweeps, world_size):
        first = group.runs[0]
        note = group.state if group.folder == first.folder else f"{group.state} as {group.folder}"
        costs = _cost(first, tflops, world_size)
        for run in group.runs:
            rows.append((str(run.folder), *costs, note if run is first else f"equal to {first.folder}"))
            different.append(run is first)
            waiting.append(run is first and group.state != "finished")
    runs = pd.DataFrame(rows, columns=["run", "tokens", "hours", "note"])
    sums = {"in all": runs, "not equal to an earlier one": runs[different], "to be trained": runs[waiting]}
    for what, some in sums.items():
        rows.append((f"{len(some)} runs {what}", some.tokens.sum(), some.hours.sum(), ""))
    width = max(len(run) for run, *_ in rows)
    return "\n".join(
        f"{run:<{width}} {tokens / 1e6:>12,.1f} M tokens {hours:>9,.2f} GPU-hours  {note}".rstrip()
        for run, tokens, hours, note in rows
    )


def _cost(run: Run, tflops: float | None, world_size: int) -> tuple[int, float]:
    """Tokens of a run, and hours of one GPU."""
    run_cost = cost.RunCost(run.resolved, world_size)
    return run_cost.config.training.steps * run_cost.tokens, run_cost.gpu_hours(tflops)
