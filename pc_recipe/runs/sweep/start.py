"""What is wrong with the runs of sweeps, before the first of them starts."""

from collections.abc import Sequence

from pc_recipe.plan.check import check
from pc_recipe.runs.sweep.equal_runs import EqualRuns


def check_runs(groups: Sequence[EqualRuns], world_size: int, gpu_gib: float | None = None) -> dict[str, str]:
    """Check each run that would be trained as a dry run does; returns {warning: the first run that has it}.

    Args:
        gpu_gib: as in `pc_recipe.plan.micro_batch.find_gpu`.

    Raises:
        UserError: the mistakes of the first run that has any.
    """
    warned: dict[str, str] = {}
    for run in [run for group in groups for run in group.to_train]:
        report = check(run.resolved, world_size, gpu_gib=gpu_gib)
        report.raise_errors(f"{run.name}: ")
        for warning in report.warnings:
            warned.setdefault(warning, run.name)
    return warned
