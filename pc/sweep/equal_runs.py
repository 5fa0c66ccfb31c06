"""Equal runs are trained once: which runs are equal, which runs of several sweeps remain, and reuse of finished ones.

Two runs are equal if everything that affects the result agrees (`pc.settings.identity`). Folders, checkpoints, logging
and health metrics do not, nor does the number of GPUs where the global batch does not depend on it. A reused run is a
link to the folder of the trained one.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pc.common import run_folder
from pc.errors import UserError
from pc.launch.run import Run
from pc.settings.chain import load_record
from pc.settings.identity import differing_result, everything, result
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
        before = trained_as(run.folder)
        if before is None and len(run_folder.configs(run.folder)) > 1:
            raise UserError(
                f"{sweep.path}: {run.folder} was trained with several configurations (config.*.toml); move it away to "
                "train it again"
            )
        config = run.resolved
        changed = differing_result(before, result(config, world_size)) if before else []
        if changed:
            was, now = everything(load_record(run.folder / "config.toml")), everything(config)
            said = ", ".join(
                f"{key} = {was[key]!r} (now {now[key]!r})" if key in was else f"another {key}" for key in changed[:3]
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
class Planned:
    """A run of one of several sweeps."""

    sweep: Sweep
    run: Run
    owner: Run
    """The first of the equal runs, perhaps this one: only the first is trained."""
    elsewhere: list[Path]
    """Other folders of equal runs."""

    @property
    def final(self) -> Path | None:
        """The folder of an equal run that finished or diverged, if there is one."""
        ends = ("finished", "diverged")
        return next((folder for folder in self.elsewhere if run_folder.state_of(folder).state in ends), None)

    @property
    def trained_elsewhere(self) -> Path | None:
        """The folder of an equal run that another process is training, if there is one."""
        return next(filter(run_folder.is_locked, self.elsewhere), None)

    @property
    def remains(self) -> bool:
        """Whether this run must be trained."""
        return self.owner == self.run and not _is_finished(self.run.folder) and self.final is None


def plan(sweeps: Sequence[Sweep], world_size: int | None = None) -> list[Planned]:
    """Every run of the sweeps, in order, with its equal runs.

    Args:
        world_size: processes that would train a run, which decide its batch if the config does not.
    """
    folders = started([OUTPUTS, *[sweep.folder for sweep in sweeps]])
    owners: list[tuple[Run, dict[str, Any]]] = []
    planned = []
    for sweep in sweeps:
        for run in sweep.runs:
            mine = result(run.resolved, world_size)
            elsewhere = [
                folder
                for folder, theirs in folders
                if not differing_result(mine, theirs) and folder.resolve() != run.folder.resolve()
            ]
            owner = next((owner for owner, theirs in owners if not differing_result(mine, theirs)), run)
            if owner is run:
                owners.append((run, mine))
            planned.append(Planned(sweep, run, owner, elsewhere))
    return planned


def take_over(sweeps: Sequence[Sweep], world_size: int | None = None) -> None:
    """Make each run that has not started a link to the folder of an equal run that finished or diverged."""
    for planned in plan(sweeps, world_size):
        folder = planned.run.folder
        if folder.is_symlink() and not folder.exists():
            folder.unlink()  # its target was deleted or moved
        if planned.final is not None and not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(planned.final.resolve(), folder.parent.resolve())
            try:
                folder.symlink_to(target, target_is_directory=True)
            except FileExistsError:
                continue  # another command already did this
            print(f"{planned.run.name}: reused from {planned.final}, an equal run", flush=True)


def _is_finished(folder: Path) -> bool:
    return run_folder.state_of(folder).state == "finished"


def plan_text(sweeps: Sequence[Sweep], cost: Callable[[Run], tuple[int, float]], world_size: int | None = None) -> str:
    """The runs, their tokens and GPU-hours by `cost` (tokens and seconds of one GPU), and what remains to be trained."""
    costs = [(planned, *cost(planned.run)) for planned in plan(sweeps, world_size)]
    lines = []
    for planned, tokens, seconds in costs:
        word = ""
        if planned.owner != planned.run:
            word = f"  equal to {planned.owner.folder}"
        elif _is_finished(planned.run.folder):
            word = "  finished"
        elif planned.final:
            word = f"  {run_folder.state_of(planned.final).state} as {planned.final}"
        elif planned.elsewhere:
            word = f"  started as {planned.elsewhere[0]}: finish it there"
        name = planned.run.name if len(sweeps) == 1 else f"{planned.sweep.path.stem}/{planned.run.name}"
        lines.append(f"{name:<56} {_cost(tokens, seconds)}{word}")
    variants: dict[str, list] = {}
    for item in costs:
        if item[0].run.variant:
            variants.setdefault(f"{item[0].sweep.path.stem}/{item[0].run.variant}", []).append(item)
    owners = [item for item in costs if item[0].owner == item[0].run]
    remaining = [item for item in owners if item[0].remains]
    sums = [(f"of {name}", items) for name, items in variants.items()]
    sums += [("in all", costs), ("not equal to an earlier one", owners), ("to be trained", remaining)]
    for what, items in sums:
        tokens, seconds = (sum(item[place] for item in items) for place in (1, 2))
        lines.append(f"{f'{len(items)} runs {what}':<56} {_cost(tokens, seconds)}")
    return "\n".join(lines)


def _cost(tokens: int, seconds: float) -> str:
    hours = seconds / 3600
    return f"{tokens / 1e6:>12,.1f} M tokens {f'{hours:,.1f}' if hours >= 10 else f'{hours:.2g}':>9} GPU-hours"
