"""Equal runs are trained once: which runs are equal, which runs of several sweeps remain, and reuse of finished ones.

Two runs are equal if everything that affects the result agrees (`pc.settings.identity`). Folders, checkpoints, logging
and health metrics do not, nor does the number of GPUs where the global batch does not depend on it. A reused run is a
link to the folder of the trained one.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pc.common import run_folder
from pc.errors import UserError
from pc.launch.run import Run
from pc.plan import cost
from pc.settings.chain import load_record
from pc.settings.identity import differing_result, result
from pc.sweep.spec import Sweep

OUTPUTS = Path("outputs")
"""Default folder of runs, of sweeps and of single configs."""


def trained_as(folder: Path) -> dict[str, Any] | None:
    """The result of a folder's run; None if there is no run, one that cannot be read, or one of changed settings."""
    file = folder / "environment.json"
    try:
        environment = json.loads(file.read_text()) if file.exists() else {}
        about = environment.get("world_size"), environment.get("data")
        first, *others = [result(load_record(config), *about) for config in run_folder.configs(folder)]
    except (UserError, ValueError):
        return None
    return None if any(other != first for other in others) else first


def require_unchanged(sweep: Sweep, world_size: int | None = None) -> None:
    """Refuse a sweep with a run that was trained with another configuration: it could not be compared.

    Runs may be added to a sweep at any time.
    """
    for run in sweep.runs:
        before, now = trained_as(run.folder), result(run.resolved, world_size)
        if before is None and len(run_folder.configs(run.folder)) > 1:
            raise UserError(
                f"{sweep.path}: {run.folder} was trained with several configurations (config.*.toml); move it away to "
                "train it again"
            )
        if changed := differing_result(before, now) if before else []:
            said = ", ".join(
                f"{key} = {before.get(key, 'its default')} (now {now.get(key, 'its default')})" for key in changed[:3]
            )
            raise UserError(
                f"{sweep.path}: {run.folder} was trained with {said}; restore that, or give the sweep another "
                'folder = "..." (unchanged runs are reused)'
            )


def started(roots: Sequence[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """All started runs below `roots` with their results, without links."""
    found = {}
    for root in roots:
        for folder, folders, files in os.walk(root):
            if "config.toml" in files:
                folders.clear()  # checkpoints and logs
                if (trained := trained_as(Path(folder))) is not None:
                    found[Path(folder)] = trained
    return list(found.items())


@dataclass(frozen=True)
class Group:
    """Equal runs of one or several sweeps: only the first is trained."""

    runs: list[Run]
    elsewhere: list[Path]
    """folders of equal runs that are none of these"""

    def folder(self, *states: str) -> Path | None:
        """The first folder of an equal run in one of these states."""
        folders = [*(run.folder for run in self.runs), *self.elsewhere]
        return next((folder for folder in folders if run_folder.state_of(folder).state in states), None)

    @property
    def remains(self) -> bool:
        """Whether the first run must be trained; one that diverged is tried again."""
        return self.folder("finished") is None

    @property
    def trained_elsewhere(self) -> Path | None:
        """The folder of an equal run that another process is training, if there is one."""
        return next(filter(run_folder.is_locked, self.elsewhere), None)


def plan(sweeps: Sequence[Sweep], world_size: int | None = None) -> list[Group]:
    """The runs of the sweeps, in the order of the first of each group.

    Args:
        world_size: processes that would train a run, which decide its batch if the config does not.
    """
    found: list[tuple[dict[str, Any], Group]] = []
    for run in (run for sweep in sweeps for run in sweep.runs):
        mine = result(run.resolved, world_size)
        equal = [group for theirs, group in found if not differing_result(mine, theirs)]
        if equal:
            equal[0].runs.append(run)
        else:
            found.append((mine, Group([run], [])))
    for folder, theirs in started([OUTPUTS, *[sweep.folder for sweep in sweeps]]):
        for mine, group in found:
            own = [run.folder.resolve() for run in group.runs]
            if not differing_result(mine, theirs) and folder.resolve() not in own:
                group.elsewhere.append(folder)
    return [group for _, group in found]


def take_over(sweeps: Sequence[Sweep], world_size: int | None = None) -> None:
    """Make each run that has not started a link to the folder of an equal run that finished or diverged."""
    for group in plan(sweeps, world_size):
        for run in group.runs:
            if run.folder.is_symlink() and not run.folder.exists():
                run.folder.unlink()  # its target was deleted or moved
        final = group.folder("finished") or group.folder("diverged")
        for run in group.runs:
            if final is not None and not run.folder.exists():
                run.folder.parent.mkdir(parents=True, exist_ok=True)
                target = os.path.relpath(final.resolve(), run.folder.parent.resolve())
                with contextlib.suppress(FileExistsError):  # another command already did this
                    run.folder.symlink_to(target, target_is_directory=True)
                    print(f"{run.name}: reused from {final}, an equal run", flush=True)


def plan_text(sweeps: Sequence[Sweep], tflops: float, world_size: int) -> str:
    """The runs, their tokens and GPU-hours, and what remains to be trained.

    Args:
        tflops: TFLOP/s of one GPU.
    """
    lines = []
    sums: dict[str, list[tuple[int, float]]] = {"in all": [], "not equal to an earlier one": [], "to be trained": []}
    for group in plan(sweeps, world_size):
        one = _cost(group.runs[0], tflops, world_size)
        word = ""
        if final := group.folder("finished") or group.folder("diverged"):
            word = f"{run_folder.state_of(final).state} as {final}"
        elif group.elsewhere:
            word = f"started as {group.elsewhere[0]}: finish it there"
        for run in group.runs:
            lines.append(f"{run.folder!s:<64} {_cost_text([one])}  {word}".rstrip())
            word = f"equal to {group.runs[0].folder}"
        sums["in all"] += [one] * len(group.runs)
        sums["not equal to an earlier one"].append(one)
        sums["to be trained"] += [one] * group.remains
    lines += [f"{f'{len(costs)} runs {what}':<64} {_cost_text(costs)}" for what, costs in sums.items()]
    return "\n".join(lines)


def _cost(run: Run, tflops: float, world_size: int) -> tuple[int, float]:
    """Tokens of a run, and hours of one GPU."""
    plan = cost.Plan(run.config, run.overrides, world_size)
    step, steps = plan.step_cost(), plan.config.training.steps
    operations = step.model + (step.pc_step if plan.config.pc.enable else 0)
    return steps * step.tokens, steps * operations / (3600e12 * tflops)


def _cost_text(costs: Sequence[tuple[int, float]]) -> str:
    tokens, hours = map(sum, zip(*costs)) if costs else (0, 0.0)
    return f"{tokens / 1e6:>12,.1f} M tokens {f'{hours:,.1f}' if hours >= 10 else f'{hours:.2g}':>9} GPU-hours"
