"""Equal runs are trained once: which runs are equal, which runs of several sweeps remain, and reuse of finished ones.

Two runs are equal if their resolved configurations agree in everything that affects the result. Folders, checkpoints,
logging and health metrics do not, nor does the number of GPUs, because the global batch does not depend on it. A reused
run is a link to the folder of the trained one.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pc.common import run_folder
from pc.config import BLOCK_GROUPS
from pc.errors import UserError
from pc.launch.run import Run
from pc.sweep.spec import Sweep
from pc.titan.config import Checkpoint, JobConfig
from pc.titan.optimizer_kinds import foreign_keys
from pc.titan.toml import resolve, to_config

OUTPUTS = Path("outputs")
"""Default folder of runs, of sweeps and of single configs."""

_NOT_THE_RESULT = ("job", "metrics", "profiling", "health", "comm", "memory_estimation")
_START = (
    "initial_load_path", "initial_load_in_hf", "initial_load_in_hf_quantized", "initial_load_model_only",
    "exclude_from_loading", "load_step",
)  # fmt: skip


def identity(resolved: dict[str, Any]) -> dict[str, Any]:
    """{"section.key": value} of everything that affects a run's result, from what `pc.titan.toml.resolve` returns."""
    sections = dataclasses.asdict(to_config(resolved, JobConfig))
    for name in _NOT_THE_RESULT:
        del sections[name]
    start = sections["checkpoint"] if sections["checkpoint"]["enable"] else dataclasses.asdict(Checkpoint())
    sections["checkpoint"] = {key: start[key] for key in _START}
    method = sections["pc"]
    if method["enable"]:
        method["blocks"] = sorted({name for entry in method["blocks"] for name in BLOCK_GROUPS.get(entry, [entry])})
    else:
        sections["pc"] = {"enable": False}
    for key in foreign_keys(sections["optimizer"]["name"]):
        del sections["optimizer"][key]
    if not sections["evaluation"]["interval"]:
        del sections["evaluation"]
    for key in ("path", "validation_path"):
        if sections["data"][key]:
            sections["data"][key] = os.path.abspath(sections["data"][key])
    return dict(_flat("", sections))


def _flat(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield prefix + key, value


def _key_of(identified: dict[str, Any]) -> str:
    return json.dumps(identified, sort_keys=True)


def trained_as(folder: Path) -> dict[str, Any] | None:
    """The identity of a folder's run; None if there is no run, one of an older version, or one of changed settings."""
    try:
        first, *others = [identity(resolve(file, [], JobConfig)) for file in run_folder.configs(folder)]
    except UserError:
        return None
    return None if any(other != first for other in others) else first


def require_unchanged(sweep: Sweep) -> None:
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
        now = identity(resolve(run.config, run.overrides, JobConfig))
        if before is None or before == now:
            continue
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        said = ", ".join(f"{key} = {before.get(key)!r} (now {now.get(key)!r})" for key in changed[:3])
        raise UserError(
            f"{sweep.path}: {run.folder} was trained with {said}; restore that, or give the sweep another "
            'folder = "..." (unchanged runs are reused)'
        )


def folders_by_key(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """All started runs below `roots`, without links."""
    found: dict[str, list[Path]] = {}
    for root in roots:
        for folder, folders, files in os.walk(root):
            if "config.toml" in files:
                folders.clear()  # checkpoints and logs
                trained = trained_as(Path(folder))
                if trained is not None and Path(folder) not in found.setdefault(_key_of(trained), []):
                    found[_key_of(trained)].append(Path(folder))
    return found


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


def plan(sweeps: Sequence[Sweep]) -> list[Planned]:
    """Every run of the sweeps, in order, with its equal runs."""
    folders = folders_by_key([OUTPUTS, *[sweep.folder for sweep in sweeps]])
    owners: dict[str, Run] = {}
    planned = []
    for sweep in sweeps:
        for run in sweep.runs:
            key = _key_of(identity(resolve(run.config, run.overrides, JobConfig)))
            elsewhere = [folder for folder in folders.get(key, []) if folder.resolve() != run.folder.resolve()]
            planned.append(Planned(sweep, run, owners.setdefault(key, run), elsewhere))
    return planned


def take_over(sweeps: Sequence[Sweep]) -> None:
    """Make each run that has not started a link to the folder of an equal run that finished or diverged."""
    for planned in plan(sweeps):
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


def plan_text(sweeps: Sequence[Sweep], cost: Callable[[Run], tuple[int, float]]) -> str:
    """The runs, their tokens and GPU-hours by `cost` (tokens and seconds of one GPU), and what remains to be trained."""
    costs = [(planned, *cost(planned.run)) for planned in plan(sweeps)]
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
    owners = [item for item in costs if item[0].owner == item[0].run]
    remaining = [item for item in owners if item[0].remains]
    for what, items in (("in all", costs), ("not equal to an earlier one", owners), ("to be trained", remaining)):
        tokens, seconds = (sum(item[place] for item in items) for place in (1, 2))
        lines.append(f"{f'{len(items)} runs {what}':<56} {_cost(tokens, seconds)}")
    return "\n".join(lines)


def _cost(tokens: int, seconds: float) -> str:
    hours = seconds / 3600
    return f"{tokens / 1e6:>12,.1f} M tokens {f'{hours:,.1f}' if hours >= 10 else f'{hours:.2g}':>9} GPU-hours"
