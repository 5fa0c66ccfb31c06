"""The report of `scripts/cost.py`: counts of a step; time and peak memory of real steps with and without PC."""

import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pc.errors import UserError
from pc_recipe.config import load_config
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.markdown import table
from pc_recipe.files.run_log import read_log
from pc_recipe.runs import cost, torchrun

WARMUP_STEPS, MEASURED_STEPS = 3, 5
VARIANTS = {
    "plain": ["--pc.enable", "false"],
    "step": ["--pc.enable", "true", "--pc.mode", "step"],
    "forward": ["--pc.enable", "true", "--pc.mode", "forward", "--pc.compute_dtype", "float32"],
}


def report(config: Path, overrides: Sequence[str], world_size: int, measure: bool, output: Path | None) -> None:
    """Print the counts, with `measure` also measurements, and write both to `output`/cost.md."""
    run_cost = cost.RunCost(load_config(config, overrides), world_size)
    text = cost.table(run_cost)
    print(text)
    if measure:
        measured = _measure(config, overrides)
        print(measured)
        text += "\n" + measured
    if output is not None:
        write_atomically(output / "cost.md", text)
        print(output / "cost.md")


def _measure(config: Path, overrides: Sequence[str]) -> str:
    """Train each of `VARIANTS` for eight steps on this machine; returns a table of time, memory and counts."""
    processes = torchrun.count_processes()
    counted = cost.RunCost(load_config(config, overrides), processes).step_cost()
    shares = {"step": counted.pc_step / counted.model, "forward": counted.pc_forward / counted.model}
    rows, plain = [], 0.0
    for name, chosen in VARIANTS.items():
        print(f"measuring {name}: {WARMUP_STEPS} + {MEASURED_STEPS} steps in {processes} processes ...", flush=True)
        seconds, memory_gib = _train(config, [*overrides, *chosen], processes)
        median = statistics.median(seconds)
        plain = plain or median  # it is the first
        share = f"{100 * shares[name]:.3g} %" if name in shares else ""
        time = f"{median:.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
        rows.append([name, time, f"{100 * (median / plain - 1):+.1f} %", share, f"{memory_gib:.2f}"])
    header = ["", "seconds per step (range)", "more than plain", "PC's share of FLOPs", "peak memory GiB"]
    return f"Measured here, on {processes} processes:\n\n" + table(header, rows)


def _train(config: Path, overrides: Sequence[str], processes: int) -> tuple[list[float], float]:
    """Seconds of each step after the warm-up, and the largest peak memory of any rank in GiB.

    Memory is the active memory of a GPU, or the resident memory of a process on a CPU.
    """
    steps = WARMUP_STEPS + MEASURED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*overrides, *torchrun.STEPS_ALONE, f"--job.dump_folder={folder}", f"--training.steps={steps}"]
        overrides += ["--metrics.log_freq=1", "--lr_scheduler.warmup_steps=1"]
        command, environment = torchrun.build_command(load_config(config, overrides), processes)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
            raise UserError(f"{config}: training ended with status {done.returncode}; its last words:\n{last}")
        run = read_log(folder)
    return list(run.series("step_seconds"))[WARMUP_STEPS:], run.series("memory_active_gib_of_all_ranks").max()
