"""Ctrl-C and SIGTERM: the run saves and stops, and the same command continues it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers.tiny import ROOT, metrics, write_small_config
from pc_recipe.files.lock import is_locked
from pc_recipe.files.run_folder import find_newest_step, read_state

SWEEP = """
configs = ["run.toml"]
folder = "{folder}/out"
seeds = [0, 1]
"""


def _interrupt(words, run, number, processes=1):
    """Start a command as a terminal does, and signal its process group after some steps; returns (status, output)."""
    environment = os.environ | {"NGPU": str(processes), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, start_new_session=True, **pipes
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 3:
            assert started.poll() is None and time.monotonic() < deadline, started.communicate()[0]
            time.sleep(0.05)
        os.killpg(started.pid, number)
        return started.wait(240), started.communicate()[0]
    finally:
        if started.poll() is None:
            for process in psutil.Process(started.pid).children(recursive=True):
                process.kill()
            started.kill()


@pytest.mark.parametrize("number, processes", [(signal.SIGINT, 2), (signal.SIGTERM, 2)])
def test_the_first_signal_saves_and_stops(tiny_shards, tmp_path, number, processes):
    run = tmp_path / "run"
    config = write_small_config(tmp_path / "run.toml", tiny_shards, steps=2000, interval=2000)
    words = ["-m", "pc_recipe.runs.local", str(config), f"--training.local_batch_size={2 // processes}"]
    words.append("--validation.freq=1")
    status, said = _interrupt(words, run, number, processes)
    state = read_state(run)
    assert (state.state, state.reason, status) == ("stopped", "asked to stop", 128 + number), said
    assert find_newest_step(run) == state.step >= 3 and not is_locked(run)
    # each step but the last was validated: the stop does not wait for the validation that was due
    assert len(metrics(run, "validation_loss")) == len(metrics(run)) - 1 == state.step - 1
    assert "saving and stopping after this step; another signal ends it at once" in said and "Traceback" not in said
    newest = run / "checkpoint" / f"step-{state.step}"
    assert said.rstrip().endswith(f"Stopped at step {state.step}; the same command continues from {newest}.")


@pytest.mark.parametrize(
    "number, expected, state",
    [
        (signal.SIGINT, 130, "stopped"),
        (signal.SIGUSR2, 0, "stopped"),
        (signal.SIGQUIT, 131, "interrupted"),  # without saving
    ],
)
def test_a_signal_ends_a_sweep(tiny_shards, tmp_path, number, expected, state):
    write_small_config(tmp_path / "run.toml", tiny_shards, steps=2000, interval=2000)
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP.format(folder=tmp_path))
    runs = tmp_path / "out" / "run"
    run = runs / "seed-0"
    status, said = _interrupt(["scripts/sweep.py", "run", str(file)], run, number)
    assert (status, read_state(run).state) == (expected, state), said
    assert state != "stopped" or find_newest_step(run) == read_state(run).step
    assert not (runs / "seed-1" / "train.log").exists()
    assert f"{state} at step {read_state(run).step}" in said and "Traceback" not in said
