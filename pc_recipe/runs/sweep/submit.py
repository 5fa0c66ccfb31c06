"""Queue the runs of sweeps on a SLURM cluster, one array per sweep."""

from collections.abc import Sequence

from pc_recipe.plan.allocation import Allocation
from pc_recipe.runs import slurm
from pc_recipe.runs.sweep import equal_runs
from pc_recipe.runs.sweep.spec import Sweep
from pc_recipe.runs.sweep.start import check_runs


def submit(sweeps: Sequence[Sweep], at_a_time: int, allocation: Allocation) -> str:
    """Check the sweeps' runs and queue unfinished ones, one array per sweep, `at_a_time` at once (0: all).

    Of equal runs, only one is queued.
    """
    groups = equal_runs.group_runs(sweeps, allocation.world_size)
    warned = check_runs(groups, allocation.world_size, allocation.gpu_gib)
    lines = [f"warning: {name}: {warning}" for warning, name in warned.items()]
    for sweep in sweeps:
        remaining = [(run, group) for group in groups if group.state != "running" for run in group.runs]
        remaining = [(run, group) for run, group in remaining if run in sweep.runs]
        waiting = [run for run, group in remaining if run in group.to_train]
        equal = [(run, group.folder) for run, group in remaining if group.state != "finished" and run not in waiting]
        line = f"{sweep.path.stem}: nothing to queue"
        if waiting:
            array = f"--array=0-{len(waiting) - 1}" + (f"%{at_a_time}" if at_a_time else "")
            options = [array, f"--job-name={sweep.path.stem}", *allocation.sbatch_options()]
            job = slurm.submit_job(sweep.folder, options, [run.resolved for run in waiting])
            line = f"job {job}: {len(waiting)} runs, logs in {sweep.folder}/slurm"
        lines += [line] + [f"  {run.name}: equal to {folder}" for run, folder in equal]
    return "\n".join(lines)
