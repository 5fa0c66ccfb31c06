"""Queue the runs of sweeps on a SLURM cluster, one array per sweep."""

import json
from collections.abc import Sequence

from pc.common.run_folder import state_of
from pc.launch import slurm
from pc.launch.allocation import Allocation
from pc.plan.dry_run import check_or_raise
from pc.sweep import equal_runs
from pc.sweep.spec import Sweep, begin


def submit(sweeps: Sequence[Sweep], at_a_time: int, allocation: Allocation) -> str:
    """Check the sweeps' runs and queue unfinished ones, one array per sweep, `at_a_time` at once (0: all).

    Of equal runs only the first is queued.
    """
    planned = equal_runs.plan(sweeps, allocation.world_size)
    for item in planned:
        check_or_raise(item.run.config, item.run.overrides, allocation.world_size)
    said = []
    for sweep in sweeps:
        run_list = begin(sweep)
        places = {listed["name"]: place for place, listed in enumerate(json.loads(run_list.read_text())["runs"])}
        mine = [item for item in planned if item.sweep is sweep]
        waiting = [places[item.run.name] for item in mine if item.remains and not item.trained_elsewhere]
        equal = [item for item in mine if state_of(item.run.folder).state != "finished" and item.owner != item.run]
        line = f"{sweep.path.stem}: all {len(mine)} runs are finished"
        if waiting:
            array = "--array=" + ",".join(map(str, waiting)) + (f"%{at_a_time}" if at_a_time else "")
            options = [array, f"--job-name={sweep.path.stem}", *allocation.words()]
            job = slurm.sbatch(sweep.folder, options, slurm.TRAIN_SCRIPT, [str(run_list)])
            line = f"job {job}: {len(waiting)} runs, logs in {sweep.folder}/slurm"
        elif equal:
            line = f"{sweep.path.stem}: nothing to queue"
        said += [line] + [f"  {item.run.name}: equal to {item.owner.folder}" for item in equal]
    return "\n".join(said)
