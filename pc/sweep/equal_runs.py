"""Equal runs are trained once: which runs are the same, which of several sweeps' runs remain, and taking one over.

Two runs are the same when their resolved configurations agree in all that decides the result. Folders of a run,
checkpoints, logging and health metrics do not; the number of GPUs does not, as the global batch holds on any.
A run that is taken over is a link to the folder of the one that was trained.
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
from pc.titan.config import JobConfig
from pc.titan.optimizer_kinds import foreign_keys
from pc.titan.toml import resolve, to_config

OUTPUTS = Path("outputs")
"""Where runs lie, of sweeps and of single configs, unless a folder was named for them."""

_NOT_THE_RESULT = ("job", "metrics", "profiling", "health", "comm", "memory_estimation")
_START = ("initial_load_path", "initial_load_in_hf", "initial_load_model_only", "load_step")


def identity(resolved: dict[str, Any]) -> dict[str, Any]:
    """{"section.key": value} of all that decides a run's result.

    Args:
        resolved: what `pc.titan.toml.resolve` returns.
    """
    sections = dataclasses.asdict(to_config(resolved, JobConfig))
    for name in _NOT_THE_RESULT:
        del sections[name]
    sections["checkpoint"] = {key: sections["checkpoint"][key] for key in _START}
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


def key_of(identified: dict[str, Any]) -> str:
    """An identity as one comparable string."""
    return json.dumps(identified, sort_keys=True)


def key_of_run(run: Run) -> str:
    return key_of(identity(resolve(run.config, run.overrides, JobConfig)))


def trained_as(folder: Path) -> dict[str, Any] | None:
    """The identity of the run that a folder holds; None when it holds none, or one of an older version."""
    try:
        return identity(resolve(folder / "config.toml", [], JobConfig))
    except UserError:
        return None


def require_unchanged(sweep: Sweep) -> None:
    """Refuse a sweep one of whose runs was trained under another configuration: it could not be compared.

    Runs may be added to a sweep at any time.
    """
    for run in sweep.runs:
        before = trained_as(run.folder)
        now = identity(resolve(run.config, run.overrides, JobConfig))
        if before is None or before == now:
            continue
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        said = ", ".join(f"{key} = {before.get(key)!r} (now {now.get(key)!r})" for key in changed[:3])
        raise UserError(
            f"{sweep.path}: {run.folder} was trained with {said}; put that back, or give the sweep another "
            'folder = "..." (runs that are still the same are taken over)'
        )


def folders_by_key(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """All runs below `roots` that have begun, links left out."""
    found: dict[str, list[Path]] = {}
    for root in roots:
        for folder, folders, files in os.walk(root):
            if "config.toml" in files:
                folders.clear()  # checkpoints and logs
                trained = trained_as(Path(folder))
                if trained is not None and Path(folder) not in found.setdefault(key_of(trained), []):
                    found[key_of(trained)].append(Path(folder))
    return found


@dataclass(frozen=True)
class Planned:
    """A run of one of several sweeps."""

    sweep: Sweep
    run: Run
    owner: Run
    """The first of the equal runs, itself perhaps: it alone is trained."""
    elsewhere: list[Path]
    """Folders of equal runs outside its own."""

    @property
    def finished(self) -> Path | None:
        """A finished equal run's folder."""
        return next((f for f in self.elsewhere if _state(f) == "finished"), None)

    @property
    def trained_elsewhere(self) -> Path | None:
        """The folder of an equal run that another process trains."""
        return next((folder for folder in self.elsewhere if run_folder.is_locked(folder)), None)

    @property
    def remains(self) -> bool:
        """Whether it is this run that has to be trained."""
        done = run_folder.state_of(self.run.folder).state == "finished" or self.finished is not None
        return self.owner == self.run and not done


def plan(sweeps: Sequence[Sweep]) -> list[Planned]:
    """Every run of the sweeps, in order, with its equals."""
    folders = folders_by_key([OUTPUTS, *[sweep.folder for sweep in sweeps]])
    owners: dict[str, Run] = {}
    planned = []
    for sweep in sweeps:
        for run in sweep.runs:
            key = key_of_run(run)
            elsewhere = [folder for folder in folders.get(key, []) if folder.resolve() != run.folder.resolve()]
            planned.append(Planned(sweep, run, owners.setdefault(key, run), elsewhere))
    return planned


def take_over(sweeps: Sequence[Sweep]) -> None:
    """Let each run that has not begun be a link to a finished equal run's folder."""
    for planned in plan(sweeps):
        folder = planned.run.folder
        if folder.is_symlink() and not folder.exists():
            folder.unlink()  # what it led to was deleted or moved
        if planned.finished is not None and not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(planned.finished.resolve(), folder.parent.resolve())
            try:
                folder.symlink_to(target, target_is_directory=True)
            except FileExistsError:
                continue  # another command was faster
            print(f"{planned.run.name}: taken over from {planned.finished}, the same run", flush=True)


def _state(folder: Path) -> str:
    file = folder / "status.json"
    return json.loads(file.read_text())["state"] if file.exists() else ""


def plan_text(sweeps: Sequence[Sweep], cost: Callable[[Run], tuple[int, float]]) -> str:
    """The runs, their tokens and GPU-hours, and what remains to be trained.

    Args:
        cost: tells a run's tokens and seconds of one GPU.
    """
    lines = []
    totals = {"in all": [0, 0, 0.0], "not equal to an earlier one": [0, 0, 0.0], "to be trained": [0, 0, 0.0]}
    for planned in plan(sweeps):
        tokens, seconds = cost(planned.run)
        word = ""
        if planned.owner != planned.run:
            word = f"  the same as {planned.owner.folder}"
        elif run_folder.state_of(planned.run.folder).state == "finished":
            word = "  finished"
        elif planned.finished:
            word = f"  finished as {planned.finished}"
        elif planned.elsewhere:
            word = f"  begun as {planned.elsewhere[0]}: finish it there"
        counted = ["in all"]
        counted += ["not equal to an earlier one"] if planned.owner == planned.run else []
        counted += ["to be trained"] if planned.remains else []
        for name in counted:
            for place, value in enumerate((1, tokens, seconds)):
                totals[name][place] += value
        lines.append(f"{_name(planned, sweeps):<56} {_cost(tokens, seconds)}{word}")
    lines += [f"{f'{count} runs {name}':<56} {_cost(*rest)}" for name, (count, *rest) in totals.items()]
    return "\n".join(lines)


def _name(planned: Planned, sweeps: Sequence[Sweep]) -> str:
    return planned.run.name if len(sweeps) == 1 else f"{planned.sweep.path.stem}/{planned.run.name}"


def _cost(tokens: int, seconds: float) -> str:
    hours = seconds / 3600
    return f"{tokens / 1e6:>12,.1f} M tokens {f'{hours:,.1f}' if hours >= 10 else f'{hours:.2g}':>9} GPU-hours"
