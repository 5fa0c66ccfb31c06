"""What a sweep says of a run whose trainer ended without a word of its own."""

import os
import signal
import sys

import pytest

from pc_recipe.files.lock import lock
from pc_recipe.files.run_folder import read_state, write_state
from pc_recipe.runs import launch
from pc_recipe.runs.run import Run
from pc_recipe.runs.sweep import local

LOGS = "print('step 7', flush=True); open('metrics.jsonl', 'a').write('{\"step\": 7}\\n'); "
REPORT = """
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
  traceback : Signal 9 (SIGKILL) received by PID 12
"""


@pytest.mark.parametrize("state", ["failed", "diverged", "running", "stopped"])
@pytest.mark.parametrize(
    "words, reason",
    [
        (f"{LOGS} import os; os.kill(os.getpid(), 9)", "killed by SIGKILL, last words: step 7"),
        (f"{LOGS} import sys; sys.exit('what it said')", "status 1, last words: what it said"),
        (
            f"{LOGS} import sys; print({REPORT!r}); sys.exit(1)",
            "a rank was killed by SIGKILL, last words: traceback : S",
        ),
    ],
)
def test_step_and_reason_are_this_attempts(tmp_path, monkeypatch, words, reason, state):
    """What is said of an earlier attempt, in status.json or train.log, is not said again."""
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
    words = "from pc_recipe.files.run_folder import write_failure; import sys; write_failure('.', 'no data', 4); sys.exit(2)"
    monkeypatch.setattr(launch, "build_command", lambda *_: ([sys.executable, "-c", words], dict(os.environ)))
    (tmp_path / "base.toml").write_text("")
    local.train_one(Run("one", str(tmp_path / "base.toml"), (), tmp_path), lock(tmp_path), 1, "one")
    assert (read_state(tmp_path).step, read_state(tmp_path).reason) == (4, "no data")


@pytest.mark.parametrize("status", [0, 1, 2, 128 + signal.SIGTERM])
def test_find_kill(status):
    assert launch.find_kill(status, "Signal 9 (SIGKILL)") == ("killed by SIGTERM" if status > 128 else "")
