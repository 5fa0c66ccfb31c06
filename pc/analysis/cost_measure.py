"""Real steps of a config with and without PC: time and peak memory beside what `cost` counts."""

import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pc.common.run_folder import read_log
from pc.errors import UserError
from pc.launch import torchrun

WARMUP_STEPS, MEASURED_STEPS = 3, 5


@dataclass(frozen=True)
class Measured:
    """Of one schedule, over the steps after the warm-up."""

    seconds_per_step: float
    """median"""
    fastest: float
    slowest: float
    memory_gib: float
    """largest peak of any rank: active memory of the GPU, or resident memory of the process on a CPU"""


def measure(config: Path, overrides: Sequence[str], processes: int) -> dict[str, Measured]:
    """Train eight steps each as "plain", "step" and "forward", one after another, on this machine.

    Nothing else is switched on: no validation, checkpoints or health metrics. Prints what it is doing.
    """
    results = {}
    variants = {
        "plain": ["--pc.enable", "false"],
        "step": ["--pc.enable", "true", "--pc.schedule", "step"],
        "forward": ["--pc.enable", "true", "--pc.schedule", "forward", "--pc.compute_dtype", "float32"],
    }
    for name, chosen in variants.items():
        print(
            f"measuring {name}: {WARMUP_STEPS} + {MEASURED_STEPS} steps in {processes} processes ...",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as folder:
            results[name] = _train(config, [*overrides, *chosen], processes, Path(folder))
    return results


def _train(config: Path, overrides: Sequence[str], processes: int, folder: Path) -> Measured:
    settings = {
        "job.dump_folder": folder,
        "training.steps": WARMUP_STEPS + MEASURED_STEPS,
        "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": "false",
        "validation.enable": "false",
        "checkpoint.enable": "false",
        "health.freq": 0,
        "health.spectra_freq": 0,
        "health.estimate_freq": 0,
    }
    words = [*overrides, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
    command, environment = torchrun.here(config, words, folder, processes)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise UserError(f"{config}: training ended with status {done.returncode}; its last words:\n{last}")
    run = read_log(folder)
    seconds = run.series("step_seconds").values[WARMUP_STEPS:]
    return Measured(
        statistics.median(seconds), min(seconds), max(seconds), max(run.series("memory_active_gib_of_all_ranks").values)
    )


def table(results: dict[str, Measured], predicted: dict[str, float]) -> str:
    """Markdown; `predicted` has PC's share of the model's operations for "step" and "forward"."""
    plain = results["plain"]
    text = [
        "| | seconds per step (range) | more than plain | PC's share of operations | peak memory GiB |",
        "|---|---|---|---|---|",
    ]
    for name, measured in results.items():
        more = 100 * (measured.seconds_per_step / plain.seconds_per_step - 1)
        share = f"{100 * predicted[name]:.3g} %" if name in predicted else ""
        text.append(
            f"| {name} | {measured.seconds_per_step:.3f} "
            f"({measured.fastest:.3f} to {measured.slowest:.3f}) | "
            f"{more:+.1f} % | {share} | {measured.memory_gib:.2f} |"
        )
    return "\n".join(text) + "\n"
