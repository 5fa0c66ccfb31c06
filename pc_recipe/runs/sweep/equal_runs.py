"""Equal runs are trained once: which runs are equal, which runs of several sweeps remain, and reuse of finished ones.

Two runs are equal if everything that affects the result agrees (`pc_recipe.train.inputs`). Folders, checkpoints, logging
and diagnostics do not, nor does the number of GPUs where the global batch does not depend on it. A run of another
folder is reused only if the same code trained all of it: a result from before a bug was fixed must not come back. A reused
run is a link to the folder of the trained one.
"""

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.config.inheritance import validated
from pc_recipe.config.run_key import BATCH, START, differing_keys
from pc_recipe.files import look, record, run_folder
from pc_recipe.files.places import CONFIG
from pc_recipe.runs.run import Run
from pc_recipe.runs.sweep.spec import SWEEPS, Sweep
from pc_recipe.train.inputs import code_version, result_key

OUTPUTS = Path("outputs")
"""Default folder of runs, of sweeps and of single configs."""

ORDER = ("finished", "running", "diverged", "stopped", "interrupted", "failed", "waiting")
"""States of runs, those nearest to the end first. A run that diverged is tried again."""


def read_result_key(folder: Path) -> dict[str, Any] | None:
    """The result key of a folder's run; None if there is no run, or its record is damaged or has changed settings."""
    parts = [(part.get("world_size"), part.get("data")) for part in run_folder.read_parts(folder)]
    try:
        configs = [record.read(file, record.Tables) for file in run_folder.list_configs(folder)]
        if None in configs:
            return None
        known = [validated(config, Config, "", extra="ignore") for config in configs]
        first, *others = [result_key(config, *part) for config, part in itertools.product(known, parts)]
    except UserError:
        return None
    return None if any(other != first for other in others) else first


def require_unchanged(sweep: Sweep, world_size: int | None = None) -> None:
    """Refuse a sweep with a run that was trained with another configuration: it could not be compared.

    Runs may be added to a sweep at any time.

    Args:
        world_size: as of `group_runs`; None if the sweep is only read.
    """
    for run in sweep.runs:
        before, now = read_result_key(run.folder), result_key(run.resolved, world_size)
        problem = ""
        if before is None and look.is_there(run.folder / CONFIG):
            problem = "several configurations, or unreadable ones (config*.toml); move it away to train it again"
        elif before is not None and (changed := differing_keys(before, now)):
            values = [f"{key} = {before.get(key, 'default')} (now {now.get(key, 'default')})" for key in changed[:3]]
            problem = f'{", ".join(values)}; restore that, or give the sweep another folder = "..."'
        if problem:
            raise UserError(f"{sweep.path}: {run.folder} was trained with {problem}")


class EqualRuns(NamedTuple):
    """Equal runs of one or several sweeps: one is trained."""

    runs: list[Run]
    state: str
    """The state of the equal run that is nearest to its end, one of these or another below `outputs/`."""
    folder: Path
    """That run's folder."""
    of_other_code: list[Path]
    """Folders of equal runs that other code or another torch finished. No other run becomes a link to them."""

    @property
    def to_train(self) -> list[Run]:
        """Each unfinished run that was started, because no link can replace it; if there is none, and no run can be
        reused, the first run that was not started."""
        started = [run for run in self.runs if look.is_there(run.folder)]
        unfinished = [run for run in started if run_folder.read_state(run.folder).state != "finished"]
        if unfinished or self.state == "finished":
            # a link may lead to another of them
            by_folder = {run.folder.resolve(): run for run in reversed(unfinished)}
            return [*by_folder.values()][::-1]
        return [run for run in self.runs if run not in started][:1]


def group_runs(sweeps: Sequence[Sweep], world_size: int | None = None) -> list[EqualRuns]:
    """Equal runs of the sweeps; the groups are in the order of their first runs.

    Args:
        world_size: number of processes that would train a run. It decides the batch if the config does not; without it,
            such a run has no equal in another folder.
    """
    groups_by_key: list[tuple[dict[str, Any], list[Run]]] = []
    for run in (run for sweep in sweeps for run in sweep.runs):
        own_key = result_key(run.resolved, world_size)
        equal = [runs for key, runs in groups_by_key if _are_equal(own_key, key)]
        if equal:
            equal[0].append(run)
        else:
            groups_by_key.append((own_key, [run]))
    trained = _read_started_runs([OUTPUTS, SWEEPS, *[sweep.folder for sweep in sweeps]])
    groups = []
    for own_key, runs in groups_by_key:
        own = [run.folder for run in runs]
        equal_ones = [folder for folder, key in trained.items() if _are_equal(own_key, key) and _knows_start(key)]
        others = [folder for folder in equal_ones if folder not in own]
        states = {folder: run_folder.read_state(folder).state for folder in [*own, *others]}
        usable = [
            folder
            for folder in states
            if _is_of_this_code(folder) or (folder in own and states[folder] not in ("finished", "diverged"))
        ]
        best = min(usable or own, key=lambda folder: ORDER.index(states[folder]))
        stale = [folder for folder in states if folder not in usable and states[folder] == "finished"]
        groups.append(EqualRuns(runs, states[best], best, stale))
    return groups


def _is_of_this_code(folder: Path) -> bool:
    """Whether this code trained all parts of a run."""
    return all(part.get("code") == code_version() for part in run_folder.read_parts(folder))


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two result keys are equal; a batch that one of them lacks may differ."""
    return not differing_keys(one, other) and BATCH in one and one[BATCH] == other.get(BATCH)


def _knows_start(key: dict[str, Any]) -> bool:
    """Whether the weights that a run starts from, if any, are known by content; their path may lead to others later."""
    return START not in key or f"content of {START}" in key


def _read_started_runs(roots: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """{folder: result key} of all started runs below `roots`, which may be links; others are not followed."""
    folders = dict.fromkeys(folder for root in roots for folder in run_folder.list_runs(root))
    keys = {folder: read_result_key(folder) for folder in folders}
    return {folder: key for folder, key in keys.items() if key is not None}


def take_over(sweeps: Sequence[Sweep], world_size: int | None = None) -> None:
    """Make each run that has not started a link to the folder of an equal run that finished or diverged."""
    for group in group_runs(sweeps, world_size):
        for run in group.runs:
            if group.state in ("finished", "diverged") and not look.is_there(run.folder):
                run.folder.parent.mkdir(parents=True, exist_ok=True)
                if look.is_link(run.folder):
                    run.folder.unlink()  # its target was deleted or moved
                target = os.path.relpath(group.folder.resolve(), run.folder.parent.resolve())
                with contextlib.suppress(FileExistsError):  # another command already did this
                    run.folder.symlink_to(target, target_is_directory=True)
                    print(f"{run.name}: reused from {group.folder}, an equal run", flush=True)
