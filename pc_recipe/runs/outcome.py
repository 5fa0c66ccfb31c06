"""What a run came to, in a few lines: losses, speed, where things are and what to do with them."""

import math
import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from pc_recipe.files import look
from pc_recipe.files.places import checkpoints_of
from pc_recipe.files.run_folder import find_newest_checkpoint, read_state
from pc_recipe.files.run_log import METRICS_FILE, VALIDATION, read_log


def describe_outcome(run: Path) -> str:
    """The outcome of a run that has ended and did not fail."""
    state, checkpoint = read_state(run), find_newest_checkpoint(run)
    if state.state == "finished":
        return "\n".join([_describe_result(run, state.step), *_list_next_commands(run, checkpoint)])
    ended = f"Stopped at step {state.step}" if state.state == "stopped" else "Ended without saving"
    if checkpoint is None:
        return f"{ended}; there is no checkpoint, so the same command starts again from the beginning."
    return f"{ended}; the same command continues from {checkpoint}."


def _describe_result(run: Path, step: int) -> str:
    """Losses, duration and speed, as far as they were logged."""
    log = read_log(run)
    losses = log.series("loss").tail(1)
    found = [f"train loss {_number(loss)}{f' (step {last})' * (last < step)}" for last, loss in losses.items()]
    found += [f"validation loss {_number(loss)}" for last, loss in log.series(VALIDATION).items() if last == step]
    for seconds in filter(None, log.seconds().tail(1)):
        timed, tokens = log.series("step_seconds").index[-1], round(log.series("step_seconds", "tokens").index[-1])
        duration, speed = timedelta(seconds=round(seconds)), f"{tokens / seconds:,.0f} tokens/s"
        if timed == step:
            found += [f"{tokens:,} tokens in {duration} of training steps", speed]
        else:
            found += [f"{round(log.lines[-1]['tokens']):,} tokens", f"{speed} (first {timed} steps, {duration})"]
    logged = f": {', '.join(found)}" if found else ""
    return f"Finished at step {step}{logged}."


def _number(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def _list_next_commands(run: Path, checkpoint: Path | None) -> list[str]:
    """Where the files are, and commands that run as they stand."""
    programs = Path(sys.executable).parent  # they work without an active environment
    python, tensorboard = (
        min(os.path.relpath(programs / name), str(programs / name), key=len) for name in ("python", "tensorboard")
    )
    folder = shlex.quote(str(run))
    names = look.names(run)
    parts = [name for name in (checkpoints_of(run).name, METRICS_FILE, "tb") if name in names]
    commands = [f"{python} scripts/report.py {folder}    # and other runs, to compare"]
    if checkpoint is not None:
        commands.append(f"{python} scripts/export_hf.py {folder} {folder}/hugging_face/{checkpoint.name}")
        commands.append(f'{python} scripts/generate.py {folder} "The river"')
    if "tb" in parts:
        commands.append(f"{tensorboard} --logdir {folder}/tb")
    return [f"{run} has {', '.join(parts)}. Next:", *(f"  {command}" for command in commands)]
