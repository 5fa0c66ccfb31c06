"""A sweep of real training runs: killed, repeated, finished and selected; two of them cannot finish."""

import json
import subprocess
import sys
import time

import psutil

from experiments import evidence
from helpers.tiny import ROOT, write_small_config
from pc_recipe.files.lock import is_locked
from pc_recipe.files.run_folder import find_newest_step, read_state
from pc_recipe.runs.sweep.points import read_results
from pc_recipe.runs.sweep.spec import load

SWEEP = """
configs = ["small.toml"]
folder = "{folder}/out"
[variants.good]
"optimizer.lr" = 1e-3
[variants.hot]
"optimizer.lr" = 1e6
[variants.lost]
"experiment.arm" = "no_such_module:Arm"
"""


def test_a_killed_sweep_goes_on_when_repeated_and_selects(tiny_shards, tmp_path, monkeypatch, command):
    """A run that diverges is a result; one that fails is not. The sweep goes on after both."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_small_config(tmp_path / "small.toml", tiny_shards, steps=20, interval=2)
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP.format(folder=tmp_path))
    run = load(file).runs[0]
    with open(tmp_path / "first_attempt.log", "w") as log:
        words = [sys.executable, "scripts/sweep.py", "run", str(file)]
        attempt = subprocess.Popen(words, stdout=log, stderr=log)
        deadline = time.monotonic() + 240
        while find_newest_step(run.folder) < 4:
            assert attempt.poll() is None, (tmp_path / "first_attempt.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below = psutil.Process(attempt.pid).children(recursive=True)
        for process in (attempt, *below):  # as when the machine loses power
            process.kill()
        attempt.wait()
        while is_locked(run.folder):  # the trainer takes a moment to free its memory
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert read_state(run.folder).state == "interrupted"
    reached = find_newest_step(run.folder)
    assert 4 <= reached < 20

    status, said, err = command("sweep.py", "run", file)
    assert status == 2 and err.strip() == "error: 2 of 3 runs did not finish: hot, lost"
    assert f"[1/3] good: from step {reached}" in said and read_state(run.folder).state == "finished"
    assert "diverged at step" in said and "No module named 'no_such_module'" in said
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert (
        max(sum(line.get("step") == step and "loss" in line for line in lines) for step in range(1, reached + 1)) == 1
    )
    good, hot = read_results(tmp_path / "out")
    assert good["settings"]["optimizer.lr"] == 1e-3 and good["tokens"] == 20 * 2 * 32
    assert (hot["name"], hot["state"], hot["validation_loss"]) == ("hot", "diverged", None)
    assert f"validation_loss {good['validation_loss']:.4f} -> " in command("sweep.py", "select", file)[1]
    assert evidence.collect([tmp_path / "out"], "study", tmp_path / "kept") == 2
    status, said, _ = command("sweep.py", "status", file)
    assert status == 0 and "failed" in said and "no_such_module" in said
