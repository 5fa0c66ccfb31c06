"""What a run's folder says: its state, its final numbers, and whether something is writing to it."""

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pc.errors import UserError
from pc.files import write_atomically
from pc.launch.sweep import Run, Selection, Sweep
from pc.titan.metrics import LossSpikes


@dataclass(frozen=True)
class State:
    """One line of `status`."""

    name: str
    state: str
    """waiting, running, interrupted, stopped, finished or failed"""
    step: int
    steps: int
    reason: str


def state_of(run: Run) -> State:
    file = run.folder / "status.json"
    if not file.exists():
        return State(run.name, "running" if is_locked(run.folder) else "waiting", 0, 0, "")
    status = json.loads(file.read_text())
    state = status["state"]
    if state == "running" and not is_locked(run.folder):
        state = "interrupted"
    return State(run.name, state, status["step"], status["steps"], status.get("reason", ""))


def write_state(run: Run, state: str, reason: str) -> None:
    """Record the end of a trainer that died before it could."""
    known = state_of(run)
    status = {"state": state, "step": known.step, "steps": known.steps, "reason": reason}
    write_atomically(run.folder / "status.json", json.dumps(status) + "\n")


def status_text(sweep: Sweep) -> str:
    lines = []
    for run in sweep.runs:
        state = state_of(run)
        progress = f"{state.step}/{state.steps}" if state.steps else ""
        reason = f"taken over from {run.folder.readlink()}" if run.folder.is_symlink() else state.reason
        lines.append(f"{run.name:<44} {state.state:<12} {progress:>15}  {reason}".rstrip())
    counts: dict[str, int] = {}
    for run in sweep.runs:
        counts[state_of(run).state] = counts.get(state_of(run).state, 0) + 1
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items()))
    return "\n".join(lines)


def read_metrics(folder: Path) -> tuple[dict[int, dict], dict[int, dict]]:
    """metrics.jsonl as {step: line} for training and for validation.

    A resumed run repeats steps: the last line of a step and kind wins. A kill may leave half a line
    behind, to which the next start appends: such a line is no line.
    """
    training: dict[int, dict] = {}
    validation: dict[int, dict] = {}
    file = folder / "metrics.jsonl"
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        kind = validation if "validation_loss" in line else training
        kind[line["step"]] = {**kind.get(line["step"], {}), **line}
    return dict(sorted(training.items())), dict(sorted(validation.items()))


def count_spikes(training: dict[int, dict], selection: Selection) -> int:
    """Spikes of the logged losses, by the trainer's own rule with the sweep's settings."""
    spikes = LossSpikes(
        selection.spike_window, selection.spike_deviations, selection.spike_margin, selection.spike_warmup
    )
    for step, line in training.items():
        if "loss" in line:
            # a loss that is not finite is null in JSON
            spikes.update(step, math.nan if line["loss"] is None else line["loss"])
    return spikes.count


def steps_between_losses(training: dict[int, dict]) -> int:
    """The longest way between two logged losses: a spike that is shorter can have been missed."""
    steps = [step for step, line in training.items() if "loss" in line]
    return max((after - before for before, after in zip(steps, steps[1:])), default=1)


def result_of(run: Run, selection: Selection) -> dict | None:
    """The final numbers of a finished run as one JSON line; None for any other."""
    state = state_of(run)
    if state.state != "finished":
        return None
    training, validation = read_metrics(run.folder)
    last = list(training.values())[-1] if training else {}
    final = {**last, **(list(validation.values())[-1] if validation else {})}
    return {
        "name": run.name,
        "config": run.config,
        "settings": run.settings,
        "seed": run.seed,
        "steps": state.steps,
        "tokens": last.get("tokens"),
        "loss": last.get("loss"),
        selection.metric: final.get(selection.metric),
        "spikes": count_spikes(training, selection),
        "steps_between_losses": steps_between_losses(training),
        "folder": str(run.folder),
    }


def collect(sweep: Sweep) -> list[dict]:
    """Write results.jsonl, one line per finished run, and return it.

    It is made anew from the run folders each time: array tasks that finish together cannot lose lines.
    """
    results = [result for run in sweep.runs if (result := result_of(run, sweep.select)) is not None]
    lines = "".join(json.dumps(result) + "\n" for result in results)
    write_atomically(sweep.folder / "results.jsonl", lines)
    return results


def latest_checkpoint(folder: Path) -> int:
    """Step of the newest complete checkpoint, 0 if there is none."""
    steps = [0]
    for metadata in folder.glob("checkpoint/step-*/.metadata"):
        steps.append(int(metadata.parent.name.removeprefix("step-")))
    return max(steps)


def is_locked(folder: Path) -> bool:
    """Whether a process that called `lock` is alive."""
    try:
        with open(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def lock(folder: Path) -> TextIO:
    """Keep others from training in the same folder; hand the open file on to the trainer's process.

    The lock lasts while any process holds the file, so it outlives a launcher that was killed while
    its trainer lives on. Its time of change is when the newest attempt began.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "lock", "a")  # open as long as the run
    for _ in range(10):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(file.fileno())
            return file
        except OSError:
            time.sleep(0.1)  # `is_locked` holds it for an instant
    file.close()
    raise UserError(f"{folder}: another process is training here")


def tail(file: Path, lines: int = 1) -> Iterator[str]:
    """The last lines of a log that say something."""
    text = file.read_text(errors="replace") if file.exists() else ""
    yield from [line.strip() for line in text.splitlines() if line.strip()][-lines:]
