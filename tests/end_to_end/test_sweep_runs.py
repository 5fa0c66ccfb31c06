"""A sweep of real training runs: killed halfway, repeated, finished, selected."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from helpers.slurm_cluster import descendants
from helpers.tiny import ROOT, write_small_config
from pc.common.run_folder import is_locked, newest_step, state_of
from pc.sweep.bars import read_results
from pc.sweep.spec import load


@pytest.fixture
def sweep_file(tiny_shards, tmp_path):
    write_small_config(tmp_path / "small.toml", tiny_shards, steps=40, interval=4)
    path = tmp_path / "lr.toml"
    path.write_text(f'configs = ["small.toml"]\nfolder = "{tmp_path}/out"\n[axes]\n"optimizer.lr" = [1e-4, 1e-3]\n')
    return path


def command(action: str, sweep: Path) -> list[str]:
    return [sys.executable, "scripts/sweep.py", action, str(sweep)]


def environment() -> dict[str, str]:
    return {**os.environ, "NGPU": "1", "OMP_NUM_THREADS": "1"}


def test_a_killed_sweep_finishes_when_repeated_and_selects(sweep_file, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = load(sweep_file)
    first, second = sweep.runs
    with open(tmp_path / "first_attempt.log", "w") as log:
        attempt = subprocess.Popen(command("run", sweep_file), cwd=ROOT, env=environment(), stdout=log, stderr=log)
        deadline = time.monotonic() + 240
        while newest_step(second.folder) < 4:
            assert attempt.poll() is None, (tmp_path / "first_attempt.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for pid in descendants(attempt.pid):  # as when the machine loses power
            os.kill(pid, signal.SIGKILL)
        attempt.wait()
        while is_locked(second.folder):  # the trainer takes a moment to free its memory
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert [state_of(run.folder).state for run in sweep.runs] == ["finished", "interrupted"]
    first_metrics = (first.folder / "metrics.jsonl").read_bytes()
    reached = newest_step(second.folder)
    assert 4 <= reached < 40

    repeated = subprocess.run(command("run", sweep_file), cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert repeated.returncode == 0, repeated.stdout + repeated.stderr
    assert f"[1/2] {first.name}: finished before" in repeated.stdout
    assert f"[2/2] {second.name}: from step {reached}" in repeated.stdout
    assert [state_of(run.folder).state for run in sweep.runs] == ["finished"] * 2
    assert (first.folder / "metrics.jsonl").read_bytes() == first_metrics  # not trained twice
    lines = [json.loads(line) for line in (second.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(sum(line["step"] == step and "loss" in line for line in lines) for step in range(1, reached + 1)) == 1
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [result["settings"]["optimizer.lr"] for result in results] == [1e-4, 1e-3]
    assert all(result["tokens"] == 40 * 2 * 32 for result in results)

    assert sweep_command(monkeypatch, "select", sweep_file) == 0
    chosen = tomllib.loads((tmp_path / "out" / "selected-small.toml").read_text())["optimizer"]["lr"]
    stable = [result for result in results if result["spikes"] == 0]
    assert chosen == min(stable, key=lambda result: result["validation_loss"])["settings"]["optimizer.lr"]
    # with 1e-4 almost nothing is learned in 40 steps, so it must not be chosen
    assert chosen != 1e-4


def test_a_run_that_diverges_is_a_result(sweep_file, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NGPU", "1")
    text = sweep_file.read_text()
    sweep_file.write_text(text[: text.index("[axes]")] + '[axes]\n"optimizer.lr" = [1e6]\n')
    assert sweep_command(monkeypatch, "run", sweep_file) == 2
    assert "diverged at step" in capfd.readouterr().out
    (result,) = read_results(tmp_path / "out")
    assert result["state"] == "diverged" and result["validation_loss"] is None


def test_a_failed_run_is_reported_with_its_reason(sweep_file, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NGPU", "1")
    text = sweep_file.read_text()
    sweep_file.write_text(text[: text.index("[axes]")] + '[axes]\n"data.path" = ["no-such-folder"]\n')
    assert sweep_command(monkeypatch, "run", sweep_file) == 2
    printed = capfd.readouterr()
    assert "no-such-folder does not exist" in printed.out
    assert printed.err.strip() == "error: 1 of 1 runs did not finish: path-no-such-folder"
    assert sweep_command(monkeypatch, "status", sweep_file) == 0
    printed = capfd.readouterr()
    assert "failed" in printed.out and "no-such-folder" in printed.out
    assert (tmp_path / "out" / "results.jsonl").read_text() == ""


def test_bad_input_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert sweep_command(monkeypatch, "plan", "no-such.toml") == 2
    assert capsys.readouterr().err == "error: no-such.toml: No such file or directory\n"


def sweep_command(monkeypatch, *words) -> int:
    """Exit status of scripts/sweep.py, run in this process."""
    monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, words)])
    try:
        runpy.run_path("scripts/sweep.py", run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return 0
