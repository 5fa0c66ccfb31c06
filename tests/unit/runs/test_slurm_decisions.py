"""When a SLURM job goes on and when it ends, without SLURM."""

import json
import os
import re
import sys
import threading

import pytest

from helpers.tiny import ROOT
from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.config import load_config, write_config
from pc_recipe.files.lock import join_lock, lock
from pc_recipe.files.run_folder import write_state
from pc_recipe.plan import micro_batch
from pc_recipe.plan.allocation import Allocation
from pc_recipe.runs import slurm
from pc_recipe.runs.run import Run
from pc_recipe.runs.slurm import requeue_or_end


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


def say(run, state: str) -> None:
    (run.folder / "status.json").write_text(json.dumps({"state": state, "step": 3, "steps": 9, "reason": "why"}))


def state_and_reason(run) -> tuple[str, str]:
    status = json.loads((run.folder / "status.json").read_text())
    return status["state"], status["reason"]


THRICE = [0, 0, 1]


@pytest.mark.parametrize(
    "state, status, answers, ends_as",
    [
        ("finished", 0, [0], "finished"),
        *(("finished", status, answers, "finished") for status, answers in ((slurm.MISTAKE, [2]), (137, THRICE))),
        ("stopped", 0, THRICE, "failed"),  # no checkpoint in three attempts: a fourth would change nothing
        *((state, slurm.MISTAKE, [2], "failed") for state in ("stopped", "running", "failed")),
        ("diverged", slurm.MISTAKE, [2], "diverged"),
        # after a crash there are two more tries; "stopped" is the state of an earlier attempt
        *((state, 137, THRICE, "failed") for state in ("running", "failed", "stopped", None)),
    ],
)
def test_what_becomes_of_a_job(run, requeued, capfd, state, status, answers, ends_as):
    if state:
        say(run, state)
    assert [requeue_or_end(run, status) for _ in answers] == answers
    requeues = 0 if (state, status) == ("finished", 0) else answers.count(0)
    assert requeued == [["scontrol", "requeue", "17"]] * requeues
    ended, reason = state_and_reason(run)
    assert ended == ends_as and reason and ("attempts stopped" in reason) == ((state, status) == ("stopped", 0))
    assert "0 times" not in reason
    text = capfd.readouterr().out
    assert ("diverged, another try would fail too" in text) == (state == "diverged")
    assert ("finished" in text) == ((state, status) == ("finished", 0))  # an earlier attempt's end is not this one's


@pytest.mark.parametrize("state, status", [("running", 1), ("stopped", 0)])
def test_a_new_checkpoint_gives_new_tries(run, requeued, state, status):
    say(run, state)
    assert [requeue_or_end(run, status) for _ in range(2)] == [0, 0]
    (run.folder / "attempts.json").write_text("{")  # a file cut short by a full disk counts as none
    checkpoint = run.folder / "checkpoint" / "step-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    say(run, state)
    assert [requeue_or_end(run, status) for _ in range(3)] == THRICE


def test_a_new_job_has_all_its_tries(run, requeued, monkeypatch):
    """However earlier jobs of the run ended. A mistake does not count as a try."""
    say(run, "running")
    assert [requeue_or_end(run, status) for status in (slurm.MISTAKE, slurm.MISTAKE, 1, 1, 1)] == [2, 2, *THRICE]
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    say(run, "running")
    assert [requeue_or_end(run, 1) for _ in range(3)] == THRICE


def test_a_second_job_leaves_the_state_of_the_run_that_another_trains(run, requeued):
    say(run, "running")
    with lock(run.folder):
        with pytest.raises(UserError, match="another process is training here"):
            slurm.run_task(run)
        assert requeue_or_end(run, 2) == 2 and requeued == []
        assert state_and_reason(run) == ("running", "why")
    assert not (run.folder / "attempts.json").exists()


def test_a_requeued_job_waits_for_the_locks_of_a_lost_node(run, monkeypatch):
    """A network file system releases them later."""
    monkeypatch.setattr(slurm.launch, "count_processes", lambda: sys.exit("the lock is had"))
    for restarts, answer in (("0", UserError), ("1", SystemExit)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        lost = join_lock(run.folder)
        threading.Timer(2, lost.close).start()
        with pytest.raises(answer, match="another process" if answer is UserError else "the lock is had"):
            slurm.run_task(run)
        lost.close()


def test_a_job_that_was_queued_by_hand_is_checked(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setattr(slurm.launch, "run_command", lambda *_, **__: pytest.fail("it has started"))
    monkeypatch.setenv("NGPU", "1")
    run = Run("run", str(tiny_config[0]), ("--training.steps=9999", "--data.max_epochs=2"), tmp_path / "run")
    with pytest.raises(UserError, match="data.max_epochs = 2 allows fewer"):
        slurm.run_task(run)


def test_an_array_task_requeues_itself_alone(run, requeued, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    say(run, "stopped")
    requeue_or_end(run, 0)
    assert requeued == [["scontrol", "requeue", "16_2"]]


def test_what_ranks_said_decides_whether_another_try_helps(run, requeued, capsys):
    log = run.folder / "logs" / "a" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    lock(run.folder).close()
    say(run, "failed")
    log.write_text("failed: step-4 could not be written (rank 3: No space left on device)\n")
    assert requeue_or_end(run, 1) == 0 and len(requeued) == 1  # there may be space later
    log.write_text("Traceback (most recent call last):\nUserError: x\nerror: x.y = 1 is wrong\nerror: z too\n")
    assert requeue_or_end(run, 1) == 2 and len(requeued) == 1  # a mistake would recur in every try
    assert capsys.readouterr().out.endswith("\nerror: x.y = 1 is wrong\nerror: z too\n")


def test_a_refusal_by_sbatch_is_one_line_that_names_sinfo(tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition specified: mian\nsbatch: error: No job' >&2\nexit 1\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = "sbatch: invalid partition specified: mian; No job (sinfo shows partitions and nodes)"
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        slurm.submit_job(tmp_path / "run", [], [])


def test_messages_of_sbatch_are_passed_on(tmp_path, monkeypatch, capsys):
    """As with --test-only, which queues nothing."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: Job 3 to start at noon' >&2\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm.submit_job(tmp_path / "run", [], []) == ""
    assert capsys.readouterr().err == "sbatch: Job 3 to start at noon\n"


def test_no_sbatch_is_a_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        exit_on_user_error(slurm.submit_job)(tmp_path, Allocation(1, 8, []).sbatch_options(), [])
    assert capsys.readouterr().err == "error: sbatch: No such file or directory\n"


def test_an_open_quote_in_options_is_a_clear_error(command):
    status, _, error = command("slurm/submit.py", ROOT / "train_configs" / "debug.toml", "--sbatch=--comment='x")
    assert (status, error) == (2, "error: --sbatch=--comment='x: No closing quotation\n")
    status, _, error = command("slurm/submit.py", ROOT / "train_configs" / "debug.toml", "--sbatch=-p main --nodes=4")
    assert status == 2 and "the checks would not see --nodes=4; give --nodes and --gpus-per-node" in error


def test_a_percent_sign_in_a_folder_is_not_a_pattern_of_slurm(tmp_path, monkeypatch):
    words = []
    done = type("Done", (), {"returncode": 0, "stdout": "17", "stderr": ""})
    monkeypatch.setattr(slurm.subprocess, "run", lambda given, **_: words.extend(given) or done)
    slurm.submit_job(tmp_path / "100%j", Allocation(1, 8, []).sbatch_options(), [])
    assert f"--output={tmp_path}/100%%j/slurm/%x-%j.log" in words


@pytest.mark.parametrize(
    "options, environment, limit",
    [
        ("", {}, None),  # train.sbatch requeues: 54 hours are three jobs of 24
        ("--no-requeue", {}, "24:00:00"),
        ("", {"SBATCH_NO_REQUEUE": ""}, "24:00:00"),
        ("", {"SBATCH_NO_REQUEUE": "", "SBATCH_TIMELIMIT": "2-0"}, "2-0"),
        ("-p main -t 53:00:00 --no-requeue", {"SBATCH_TIMELIMIT": "4-0"}, "53:00:00"),
        ("--no-requeue --time 3239", {}, "3239"),
        ("--no-requeue --requeue", {}, None),
        *(
            (f"--no-requeue --time={enough}", {}, None)
            for enough in ("3241", "2-7", "2-06:01", "54:01:00", "UNLIMITED", "0")
        ),
    ],
)
def test_a_limit_that_is_too_short_without_requeue_is_refused(monkeypatch, options, environment, limit):
    """The run takes 54 hours. The formats are those of sbatch's manual."""
    for name in ("SBATCH_TIMELIMIT", "SBATCH_REQUEUE", "SBATCH_NO_REQUEUE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    allocation = Allocation(2, 8, options.split())
    if limit is None:
        allocation.require_time(54.0, "x.toml")
        return
    with pytest.raises(UserError) as raised:
        allocation.require_time(54.0, "x.toml")
    assert str(raised.value) == (
        f"x.toml takes about 54.0 hours on 16 GPUs, but its time limit is {limit} without requeue: leave out --no-requeue, or "
        'give --sbatch="--time=65:00:00"'
    )


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_a_job_trains_and_judges_the_run_that_was_submitted(monkeypatch, tmp_path, tiny_shards, change):
    """Even if its TOML has been edited for the next run, or deleted."""
    sent = []
    done = type("Done", (), {"returncode": 0, "stdout": "17", "stderr": ""})
    monkeypatch.setattr(slurm.subprocess, "run", lambda words, env, **_: sent.append(words) or sent.append(env) or done)
    monkeypatch.setenv("NGPU", "1")  # this shell's
    config = tmp_path / "run.toml"
    config.write_text(f'[job]\ndump_folder = "{tmp_path}/first"\n[data]\npath = "{tiny_shards}"\n')
    found, find_gpu = [], micro_batch.find_gpu
    monkeypatch.setattr(micro_batch, "find_gpu", lambda gib=None: found.append(gib) or find_gpu(gib))
    words = ["--training.seq_len=16", "--training.steps=3", "--lr_scheduler.warmup_steps=1"]
    slurm.submit_run(str(config), words, Allocation(1, 8, []))
    config.write_text(config.read_text().replace("first", "second")) if change == "edited" else config.unlink()
    submitted = slurm.read_run(sent[0][-1:])
    assert submitted.folder == tmp_path / "first" and submitted.resolved.training.steps == 3
    assert "NGPU" not in sent[1] and found == [79.0]  # None would mean a GPU of this machine
    if change == "edited":
        run = tmp_path / "second"
        write_config(load_config(config, words), run / "config.toml")
        write_state(run, "finished", 3, 3)
        (run / "checkpoint" / "step-3").mkdir(parents=True)
        (run / "checkpoint" / "step-3" / ".metadata").touch()
        assert "second has finished before" in slurm.submit_run(str(config), words, Allocation(1, 8, []))
        assert len(sent) == 2


def test_submit_says_what_a_dry_run_says(command, monkeypatch, tmp_path, tiny_shards):
    """Including the warnings; and it adds the time limit."""
    sent = []
    done = type("Done", (), {"returncode": 0, "stdout": "17", "stderr": ""})
    monkeypatch.setattr(slurm.subprocess, "run", lambda words, **_: sent.append(words) or done)
    monkeypatch.delenv("SBATCH_TIMELIMIT", raising=False)
    config = ROOT / "train_configs" / "1b_adamw_pc.toml"
    words = [f"--data.path={tiny_shards}", f"--job.dump_folder={tmp_path / 'run'}"]
    words += ["--training.seq_len=16", "--training.steps=1000000000", "--data.max_epochs=1000000000"]
    status, dry, _ = command("dry_run.py", config, "--world-size=16", *words)
    assert status == 0 and "warning: the run repeats its" in dry
    status, said, _ = command("slurm/submit.py", config, "--nodes=2", *words)
    *report, job = said.splitlines()
    limit = [line for line in report if line.startswith("time limit ")]
    assert status == 0 and job.startswith("job 17: ") and "24:00:00, about " in limit[0]
    assert [line for line in report if line not in limit] == dry.splitlines()
    status, _, err = command("slurm/submit.py", config, "--nodes=2", "--sbatch=--no-requeue", *words)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and "its time limit is 24:00:00" in err
    status, said, _ = command("slurm/submit.py", config, "--nodes=2", "--print", "--sbatch=--comment='a b'", *words)
    assert status == 0 and said.splitlines()[-1].startswith("sbatch --parsable ") and "'--comment=a b'" in said
    assert len(sent) == 1  # nothing was queued
