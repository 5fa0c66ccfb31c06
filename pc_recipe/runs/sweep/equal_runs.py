"""Equal runs are trained once: which runs are equal, which runs of several sweeps remain, and reuse of finished ones.

Two runs are equal if everything that affects the result agrees (`pc_recipe.config.run_key`). Folders, checkpoints, logging
and health metrics do not, nor does the number of GPUs where the global batch does not depend on it. A run of another
folder is reused only if the same code trained it: a result from before a mended bug must not come back. A reused run is
a link to the folder of the trained one.
"""

import contextlib
import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.config.inheritance import validated
from pc_recipe.config.run_key import code, differing, result
from pc_recipe.files import run_folder
from pc_recipe.runs.run import Run
from pc_recipe.runs.sweep.spec import Sweep

OUTPUTS = Path("outputs")
"""Default folder of runs, of sweeps and of single configs."""

ORDER = ("finished", "running", "diverged", "stopped", "interrupted", "failed", "waiting")
"""states of runs, the one nearest to its end first; one that diverged is tried again"""


def trained_as(folder: Path) -> dict[str, Any] | None:
    """The result of a folder's run; None if there is no run, one that cannot be read, or one of changed settings."""
    file = folder / "environment.json"
    try:
        environment = json.loads(file.read_text()) if file.exists() else {}
        about = environment.get("world_size"), environment.get("data")
        configs = [tomllib.loads(file.read_text()) for file in run_folder.configs(folder)]
        first, *others = [result(validated(config, Config, "", extra="ignore"), *about) for config in configs]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):  # a UserError is a ValueError
        return None
    return None if any(other != first for other in others) else first


def require_unchanged(sweep: Sweep) -> None:
    """Refuse a sweep with a run that was trained with another configuration: it could not be compared.

    Runs may be added to a sweep at any time.
    """
    for run in sweep.runs:
        before, now = trained_as(run.folder), result(run.resolved)
        said = ""
        if before is None and len(run_folder.configs(run.folder)) > 1:
            said = "several configurations (config.*.toml); move it away to train it again"
        elif before is not None and (changed := differing(before, now)):
            values = [f"{key} = {before.get(key, 'default')} (now {now.get(key, 'default')})" for key in changed[:3]]
            said = f'{", ".join(values)}; restore that, or give the sweep another folder = "..."'
        if said:
            raise UserError(f"{sweep.path}: {run.folder} was trained with {said}")


class Group(NamedTuple):
    """Equal runs of one or several sweeps: only the first is trained."""

    runs: list[Run]
    state: str
    """of the equal run that is nearest to its end, one of these or another below `outputs/`"""
    folder: Path
    """of that run"""
    of_other_code: list[Path]
    """folders of equal runs that other code or another torch finished, which are not reused"""


def plan(sweeps: Sequence[Sweep], world_size: int | None = None) -> list[Group]:
    """The runs of the sweeps, in the order of the first of each group.

    Args:
        world_size: processes that would train a run, which decide its batch if the config does not.
    """
    found: list[tuple[dict[str, Any], list[Run]]] = []
    for run in (run for sweep in sweeps for run in sweep.runs):
        mine = result(run.resolved, world_size)
        equal = [runs for theirs, runs in found if not differing(mine, theirs)]
        if equal:
            equal[0].append(run)
        else:
            found.append((mine, [run]))
    trained = _started([OUTPUTS, *[sweep.folder for sweep in sweeps]])
    groups = []
    for mine, runs in found:
        own = [run.folder for run in runs]
        others = [folder for folder, theirs in trained.items() if folder not in own and not differing(mine, theirs)]
        usable = [folder for folder in others if _code_of(folder) == code()]
        states = {folder: run_folder.state_of(folder).state for folder in [*own, *others]}
        best = min([*own, *usable], key=lambda folder: ORDER.index(states[folder]))
        stale = [folder for folder in others if folder not in usable and states[folder] == "finished"]
        groups.append(Group(runs, states[best], best, stale))
    return groups


def _code_of(folder: Path) -> dict[str, str] | None:
    try:
        return json.loads((folder / "environment.json").read_text()).get("code")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _started(roots: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """{folder: result} of all started runs below `roots`, without links."""
    found = {}
    for root in roots:
        for folder, folders, files in os.walk(root):
            if "config.toml" in files:
                folders.clear()  # checkpoints and logs
                if (trained := trained_as(Path(folder))) is not None:
                    found[Path(folder)] = trained
    return found


def take_over(sweeps: Sequence[Sweep], world_size: int | None = None) -> None:
    """Make each run that has not started a link to the folder of an equal run that finished or diverged."""
    for group in plan(sweeps, world_size):
        for run in group.runs:
            if run.folder.is_symlink() and not run.folder.exists():
                run.folder.unlink()  # its target was deleted or moved
            if group.state in ("finished", "diverged") and not run.folder.exists():
                run.folder.parent.mkdir(parents=True, exist_ok=True)
                target = os.path.relpath(group.folder.resolve(), run.folder.parent.resolve())
                with contextlib.suppress(FileExistsError):  # another command already did this
                    run.folder.symlink_to(target, target_is_directory=True)
                    print(f"{run.name}: reused from {group.folder}, an equal run", flush=True)
