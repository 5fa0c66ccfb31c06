"""What a sweep reports about a run whose trainer ended without reporting a reason."""

import errno
import os
import sys

import pytest

from pc.errors import UserError
from pc_recipe.files.errors import ReadFailed
from pc_recipe.files.lock import lock
from pc_recipe.files.run_folder import read_state, write_state
from pc_recipe.runs import launch
from pc_recipe.runs.run import Run
from pc_recipe.runs.sweep import local
from pc_recipe.runs.sweep.results import collect
from pc_recipe.runs.sweep.spec import load

LOGS = "print('step 7', flush=True); open('metrics.jsonl', 'a').write('{\"step\": 7}\\n'); "
REPORT = """
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
  traceback : Signal 9 (SIGKILL) received by PID 12
"""


@pytest.mark.parametrize("state", ["failed", "diverged"])
@pytest.mark.parametrize(
    "words, reason",
    [
        (f"{LOGS} import os; os.kill(os.getpid(), 9)", "killed by SIGKILL, last words: step 7"),
        (f"{LOGS} import sys; sys.exit('Signal 9 (SIGKILL)')", "status 1, last words: Signal 9 (SIGKILL)"),
        (
            f"{LOGS} import sys; print({REPORT!r}); sys.exit(1)",
            "a rank was killed by SIGKILL, last words: traceback : S",
        ),
    ],
)
def test_step_and_reason_are_this_attempts(tmp_path, monkeypatch, words, reason, state):
    """The reason of an earlier attempt, in status.json or train.log, is not repeated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "build_command", lambda *_: ([sys.executable, "-c", words], dict(os.environ)))
    (tmp_path / "base.toml").write_text("[training]\nsteps = 20\n")
    (tmp_path / "train.log").write_text("words of an earlier attempt\n")
    write_state(tmp_path, state, 3, 20, "why an earlier attempt ended")
    run = Run("one", str(tmp_path / "base.toml"), (), tmp_path)
    local.train_one(run, lock(tmp_path), 1, "[1/1] one")
    found = read_state(tmp_path)
    assert (found.state, found.step, found.steps) == ("failed", 7, 20) and found.reason.startswith(reason)


def test_a_trainers_own_reason_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "from pc_recipe.files.run_folder import write_failure; import pathlib, sys; write_failure(pathlib.Path(), 'no data', 4); sys.exit(2)"
    monkeypatch.setattr(launch, "build_command", lambda *_: ([sys.executable, "-c", words], dict(os.environ)))
    (tmp_path / "base.toml").write_text("")
    local.train_one(Run("one", str(tmp_path / "base.toml"), (), tmp_path), lock(tmp_path), 1, "one")
    assert (read_state(tmp_path).step, read_state(tmp_path).reason) == (4, "no data")


def test_a_mistake_in_one_run_is_that_runs_failure(tmp_path, monkeypatch):
    """It must not keep the next run of the sweep from starting."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text("")

    def refuse(*_):
        raise UserError("no C++ compiler")

    monkeypatch.setattr(launch, "build_command", refuse)
    local.train_one(Run("one", str(tmp_path / "base.toml"), (), tmp_path), lock(tmp_path), 1, "one")
    assert (read_state(tmp_path).state, read_state(tmp_path).reason) == ("failed", "no C++ compiler")


def test_an_error_in_a_progress_line_does_not_end_the_training(tmp_path, monkeypatch):
    """Such as one read error of a disk, or a closed terminal: without its launcher, the trainer would go on alone."""
    monkeypatch.setattr(launch, "SECONDS_BETWEEN_PROGRESS_LINES", 0)
    asked = []

    def fail():
        asked.append(1)
        raise [OSError(errno.EIO, "made by the test"), ReadFailed("made by the test")][len(asked) % 2]

    words = [sys.executable, "-c", "import time; time.sleep(3.5); exit(3)"]
    assert launch.run_command(words, dict(os.environ), meanwhile=fail) == 3 and len(asked) > 1


def test_a_run_that_diverged_before_its_first_line_is_a_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text("")
    (tmp_path / "sweep.toml").write_text('configs = ["base.toml"]\nfolder = "out"\n')
    sweep = load("sweep.toml")
    write_state(sweep.runs[0].folder, "diverged", 1, 20)
    [result] = collect(sweep)
    assert (result["state"], result["loss"], result["validation_loss"]) == ("diverged", None, None)
