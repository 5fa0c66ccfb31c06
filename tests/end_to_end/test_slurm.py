"""Sweeps and runs under a real SLURM on this machine: killed, stopped by signal, requeued, finished."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from helpers import slurm_cluster
from helpers.made_runs import make_evaluation_data
from helpers.tiny import ROOT, make_shards, write_small_config
from pc_recipe.files.run_folder import find_newest_step, read_state
from pc_recipe.plan.allocation import Allocation
from pc_recipe.runs.sweep.select import select
from pc_recipe.runs.sweep.spec import load
from pc_recipe.runs.sweep.submit import submit as submit_sweeps

SECONDS = 600  # an idle machine needs a sixth of it


@pytest.fixture(scope="module")
def slurm():
    with slurm_cluster.cluster() as environment:
        yield environment


@pytest.fixture
def here(slurm, monkeypatch, tmp_path, tiny_shards):
    """The repository as working directory, SLURM's programs on the PATH, and a config of a few seconds."""
    monkeypatch.chdir(ROOT)
    for key in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(key, slurm[key])
    monkeypatch.setenv("NGPU", "1")
    return write_small_config(tmp_path / "small.toml", tiny_shards, steps=40, interval=4)


def process_of(folder: Path) -> int:
    """Process id of a rank that trains into `folder`; its launcher has the same arguments, but is older."""
    words = ["pgrep", "--newest", "--full", f"pc_recipe.runs.worker.*{folder}"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def wait_for(condition, folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        logs = [log.read_text()[-3000:] for log in folder.rglob("slurm/*.log")]
        assert time.monotonic() < deadline, "\n".join(logs)
        time.sleep(0.1)


def job_field(job: str, field: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True).stdout
    return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{field}="))


def submit(config: Path, *words: str) -> str:
    """Submit a run as a user does; returns the job's id."""
    command = [sys.executable, "scripts/slurm/submit.py", str(config), "--gpus-per-node=0", "--sbatch=--time=15"]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return re.search(r"^job (\d+):", done.stdout, re.MULTILINE)[1]


@pytest.mark.soak
def test_a_sweep_survives_a_killed_task(here, tmp_path):
    (tmp_path / "lr.toml").write_text(
        f'configs = ["small.toml"]\nfolder = "{tmp_path}/out"\n[axes]\n"optimizer.lr" = [1e-3, 1e-2]\n'
    )
    sweep = load(tmp_path / "lr.toml")
    said = submit_sweeps([sweep], 0, Allocation(1, 0, ["--time=15"]))
    job = re.search(r"^job (\d+):", said, re.MULTILINE)[1]
    victim = sweep.runs[0]
    wait_for(lambda: find_newest_step(victim.folder) >= 4, sweep.folder)
    os.kill(process_of(victim.folder), signal.SIGKILL)
    wait_for(lambda: all(read_state(run.folder).state == "finished" for run in sweep.runs), sweep.folder)

    wait_for(lambda: job_field(f"{job}_0", "JobState") == "COMPLETED", sweep.folder)
    assert [job_field(f"{job}_{index}", "Restarts") for index in range(2)] == ["1", "0"]
    log = (sweep.folder / "slurm" / f"lr-{job}_0.log").read_text()
    assert "attempt 1 since the last checkpoint; requeueing" in log
    assert "Loading the checkpoint from" in log
    assert "optimizer.lr = " in select(sweep)
    chosen = tomllib.loads((sweep.folder / "selected-small.toml").read_text())
    assert chosen["optimizer"]["lr"] in (1e-3, 1e-2)
    assert submit_sweeps([sweep], 0, Allocation(1, 0, [])) == "lr: nothing to queue"


@pytest.mark.soak
def test_a_run_that_is_signalled_saves_and_goes_on_exactly(here, tmp_path):
    """USR2, as sent by SLURM before the time limit, at a step outside the checkpoint interval."""
    folder = tmp_path / "signalled"
    job = submit(here, f"--job.dump_folder={folder}", "--checkpoint.interval=1000", "--training.steps=120")
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count('"loss"') >= 2, tmp_path)
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    wait_for(lambda: find_newest_step(folder) > 0, tmp_path)
    stopped_at = find_newest_step(folder)
    assert 2 <= stopped_at < 120
    wait_for(lambda: read_state(folder).state == "finished", tmp_path)
    wait_for(lambda: job_field(job, "JobState") == "COMPLETED", tmp_path)
    assert job_field(job, "Restarts") == "1"
    lines = metrics.read_text().splitlines()
    steps = [line.split(",")[0] for line in lines if '"loss"' in line]
    assert len(steps) == len(set(steps)) == 120  # every step once: none lost, none repeated


@pytest.mark.soak
def test_a_users_mistake_is_not_requeued(here, tmp_path):
    """torchrun ends with status 1 even if its ranks end with 2, so the job reads their messages."""
    folder = tmp_path / "damaged"
    (folder / "checkpoint" / "step-4").mkdir(parents=True)
    (folder / "checkpoint" / "step-4" / ".metadata").write_bytes(b"no index")
    job = submit(here, f"--job.dump_folder={folder}")
    wait_for(lambda: job_field(job, "JobState") in ("FAILED", "COMPLETED"), tmp_path)
    assert [job_field(job, field) for field in ("JobState", "Restarts", "ExitCode")] == ["FAILED", "0", "2:0"]
    last = next(folder.glob("slurm/*.log")).read_text().splitlines()[-1]
    assert last.startswith(f"error: {folder}/checkpoint/step-4")


@pytest.mark.soak
def test_two_nodes_train_one_run_and_a_job_behind_it_scores_it(here, tmp_path):
    folder, shards = tmp_path / "run", make_shards(tmp_path / "text", "mistral-common")
    evaluation = make_evaluation_data(tmp_path / "evals")
    words = [f"--job.dump_folder={folder}", f"--data.path={shards}", "--model.vocab_size=32000"]
    train = submit(here, "--nodes=2", *words, "--training.steps=4", "--training.local_batch_size=1")
    after = [f"--dependency=afterok:{train}", "--parsable", f"--output={folder}/slurm/score-%j.log"]
    scoring = ["sbatch", *after, "scripts/slurm/score.sbatch", str(folder), "--data", str(evaluation), "--tasks=piqa"]
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    score = subprocess.run(scoring, env=environment, capture_output=True, text=True).stdout.strip()
    wait_for(lambda: job_field(score, "JobState") in ("COMPLETED", "FAILED"), tmp_path)
    log = "".join(file.read_text() for file in folder.glob("slurm/score-*.log"))
    assert job_field(score, "JobState") == "COMPLETED", log
    assert job_field(train, "JobState") == "COMPLETED" and job_field(train, "NumNodes") == "2"
    found = json.loads((folder / "environment.json").read_text())
    assert found["world_size"] == 2 and found["commit"]
    assert (folder / "hugging_face" / "step-4" / "config.json").exists()
    assert "piqa" in log or list((folder / "scores").rglob("*.md"))
