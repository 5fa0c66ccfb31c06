"""When a SLURM job goes on and when it ends, without SLURM."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from pc.common.errors import exit_on_user_error
from pc.common.run_folder import is_locked, lock
from pc.errors import UserError
from pc.launch import slurm, torchrun
from pc.launch.slurm import Allocation, after, run_of
from pc.settings import Config
from pc.sweep.spec import Run
from pc.titan import cpu


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return Run("run", "config.toml", (), tmp_path / "run")


@pytest.fixture
def requeued(monkeypatch):
    """The jobs handed to scontrol."""
    jobs = []
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)

    def record(words):
        jobs.append(words)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(slurm.subprocess, "run", record)
    return jobs


def say(run, state: str, step: int = 3) -> None:
    (run.folder / "status.json").write_text(json.dumps({"state": state, "step": step, "steps": 9, "reason": "why"}))


def add_checkpoint(run, step: int) -> None:
    folder = run.folder / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()


def test_finished_ends_well(run, requeued):
    say(run, "finished")
    assert after(run, 0) == 0 and requeued == []


def test_stopped_goes_on_however_often(run, requeued):
    say(run, "stopped")
    assert [after(run, 0) for _ in range(5)] == [0] * 5
    assert requeued == [["scontrol", "requeue", "17"]] * 5


def test_a_mistake_is_not_tried_again(run, requeued):
    for state in ("stopped", "running", "failed"):
        say(run, state)
        assert after(run, 2) == 2 and requeued == []
        assert json.loads((run.folder / "status.json").read_text())["state"] == "failed"


def test_a_diverged_run_stays_diverged(run, requeued, capfd):
    say(run, "diverged")
    assert after(run, 2) == 2 and requeued == [] and "diverged, another try would fail too" in capfd.readouterr().out
    assert json.loads((run.folder / "status.json").read_text())["state"] == "diverged"


def test_a_second_job_leaves_the_state_of_the_run_that_another_trains(run, requeued):
    say(run, "running")
    with lock(run.folder):
        with pytest.raises(UserError, match="another process is training here"):
            slurm.task(run)
        assert after(run, 2) == 2 and requeued == []
        assert json.loads((run.folder / "status.json").read_text())["state"] == "running"
    assert not (run.folder / "crashes.json").exists()


def test_an_array_task_requeues_itself_alone(run, requeued, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    say(run, "stopped")
    after(run, 0)
    assert requeued == [["scontrol", "requeue", "16_2"]]


@pytest.mark.parametrize("state", ["running", "failed", None])
def test_a_crash_is_tried_twice_more(run, requeued, state):
    if state:
        say(run, state)
    assert [after(run, 137) for _ in range(3)] == [0, 0, 1]
    assert len(requeued) == 2
    status = json.loads((run.folder / "status.json").read_text())
    assert status["state"] == "failed" and status["reason"]


def test_a_new_checkpoint_gives_new_tries(run, requeued):
    say(run, "running")
    assert [after(run, 1) for _ in range(2)] == [0, 0]
    add_checkpoint(run, 5)
    assert [after(run, 1) for _ in range(3)] == [0, 0, 1]


def test_run_of_a_list_and_of_a_config(tmp_path, monkeypatch):
    config = tmp_path / "tiny.toml"
    config.write_text("")
    listed = {"name": "b", "config": str(config), "overrides": [f"--job.dump_folder={tmp_path}/b"]}
    (tmp_path / "runs.json").write_text(json.dumps({"files": {}, "runs": [{**listed, "name": "a"}, listed]}))
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    run = run_of([str(tmp_path / "runs.json")])
    assert (run.name, run.folder) == ("b", tmp_path / "b")
    run = run_of([str(config), "--training.steps=3"])
    assert (run.name, str(run.folder), run.overrides) == ("tiny", "outputs/tiny", ("--training.steps=3",))


def test_no_sbatch_is_a_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        exit_on_user_error(slurm.sbatch)(tmp_path, Allocation(1, 8, []).words(), slurm.TRAIN_SCRIPT, [])
    assert capsys.readouterr().err == "error: sbatch: No such file or directory\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(gpus that torch sees, gpus that SLURM gave, whether there is a device file, NGPU)"""

    def machine(seen: int, given: int | None = None, device: bool = False, wish: str = "") -> None:
        monkeypatch.setattr(torchrun.torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torchrun.torch.cuda, "is_available", lambda: seen > 0)
        monkeypatch.setattr(cpu, "GPU", str(tmp_path if device else tmp_path / "none"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", "" if given is None else str(given))
        monkeypatch.setenv("NGPU", wish)

    return machine


@pytest.mark.parametrize(
    "seen, given, wish, expected",
    [(0, None, "", 1), (4, None, "", 4), (4, None, "2", 2), (0, None, "3", 3), (8, 8, "", 8), (7, 8, "4", 4)],
)
def test_processes_here(machine, seen, given, wish, expected):
    machine(seen, given, device=seen > 0, wish=wish)
    assert torchrun.processes_here() == expected


@pytest.mark.parametrize("wish, gpus", [("0", 0), ("two", 0), ("-1", 0), ("5", 4)])
def test_wrong_ngpu(machine, wish, gpus):
    machine(gpus, wish=wish)
    with pytest.raises(UserError, match=f"NGPU={wish}"):
        torchrun.processes_here()


def test_gpus_that_are_missing_or_that_torch_cannot_use(machine, monkeypatch):
    machine(7, given=8)
    with pytest.raises(SystemExit, match="shows 7 of the 8 GPUs of this job"):  # status 1: requeued
        torchrun.processes_here()
    for given, device in ((8, False), (None, True)):
        machine(0, given, device)
        for trains in (torchrun.processes_here, cpu.use_cpu_where_there_is_no_gpu):
            with pytest.raises(UserError, match="has GPUs that torch .* cannot use"):
                trains()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert torchrun.processes_here() == 1  # as wished


def test_a_file_system_without_locks_is_no_other_trainer(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="cannot be locked"):
        lock(tmp_path).close()
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("own", [None, "max_split_size_mb:64"])
def test_a_training_process_has_growing_memory_segments_unless_the_user_said_otherwise(own, tmp_path, monkeypatch):
    (tmp_path / "shows.py").write_text("import os, sys; print(os.environ['PYTORCH_ALLOC_CONF'])")
    monkeypatch.setattr(torchrun, "TRAINER", "shows")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    if own:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", own)
    config = Config(job={"dump_folder": str(tmp_path)})
    words, environment = torchrun.command(config, 1)
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    wanted = own or "expandable_segments:True"
    assert done.stdout == f"{wanted}\n", done.stderr
    assert torchrun.command(config, 2)[1]["PYTORCH_ALLOC_CONF"] == wanted  # torchrun hands its own on


def test_the_reason_is_the_last_thing_said(run, requeued, capsys):
    def log(attempt, rank, text, age=0.0):
        file = run.folder / "logs" / attempt / "attempt_0" / str(rank) / "stderr.log"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        os.utime(file, (file.stat().st_mtime - age,) * 2)

    assert torchrun.last_words(run.folder) is None
    log("a", 0, "error: of yesterday\n", age=90000)
    lock(run.folder).close()
    assert torchrun.last_words(run.folder) is None  # an attempt that has said nothing yet
    log("b", 0, "step 1\n")
    log("b", 1, "step 1\nTraceback (most recent call last):\n  File\nRuntimeError: no more\n")
    assert torchrun.last_words(run.folder).startswith("rank 1 ended with 'RuntimeError: no more'; its log is ")
    say(run, "failed")
    assert after(run, 1) == 0 and requeued
    log("b", 3, "failed: step-4 could not be written (rank 3: No space left on device)\n", age=-1)
    assert after(run, 1) == 0 and len(requeued) == 2  # perhaps there is space later
    requeued.clear()
    log("b", 2, "Traceback (most recent call last):\nUserError: x\nerror: x.y = 1 is wrong\nerror: z too\n")
    assert after(run, 1) == 2 and not requeued  # a mistake comes back at every try
    assert capsys.readouterr().out.endswith("\nerror: x.y = 1 is wrong\nerror: z too\n")


WAITS = "import signal, sys, time; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7)); print('ready', flush=True)"


@pytest.mark.parametrize(
    "sent, term_saves, status", [(signal.SIGUSR2, False, 7), (signal.SIGTERM, True, 7), (signal.SIGTERM, False, None)]
)
def test_signals_reach_the_command_and_end_what_started_it(tmp_path, monkeypatch, sent, term_saves, status):
    """After SIGTERM a sweep does not start its next run; before a preemption SLURM's task saves."""
    monkeypatch.setattr(torchrun, "SECONDS_BETWEEN_PROGRESS_LINES", 0.1)
    said, before = tmp_path / "said", signal.getsignal(signal.SIGTERM)

    def meanwhile() -> None:
        if said.read_text() == "ready\n":
            os.kill(os.getpid(), sent)

    words = [sys.executable, "-c", f"{WAITS}; time.sleep(60)"]
    with open(said, "w") as output, contextlib.ExitStack() as stack:
        if status is None:
            stack.enter_context(pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)))
        assert torchrun.run(words, dict(os.environ), (), output, meanwhile, term_saves=term_saves) == status
    assert signal.getsignal(signal.SIGTERM) == before
