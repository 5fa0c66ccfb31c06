import errno
import json
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchtitan.tools.logging import logger

from pc_recipe.files.run_folder import write_state
from pc_recipe.runs import worker
from pc_recipe.train.console import start_logging


def test_only_rank_0_logs_more_than_warnings(capsys, monkeypatch):
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    for rank in (0, 1, 63):
        start_logging(rank)
        logger.info(f"a step of {rank}")
        logger.warning(f"a warning of {rank}")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=2)[2] for line in printed] == [  # after date and time
        "a step of 0", *(f"WARNING a warning of {rank}" for rank in (0, 1, 63))
    ]  # fmt: skip


@pytest.fixture
def ends(tmp_path, monkeypatch, capsys):
    """Starts the worker with a training that ends in an error; returns its status, stderr and the state in status.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")

    def start(train, close=lambda: None) -> tuple[int, str, str]:
        trainer = SimpleNamespace(
            step=3,
            train=lambda record: train(),
            close=close,
            checkpointer=SimpleNamespace(end_save=lambda: None),
        )
        monkeypatch.setattr(worker, "Trainer", lambda config: trainer)
        monkeypatch.setattr(sys, "argv", ["worker", "run.toml"])
        monkeypatch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as ended:
            worker.main()
        return (
            ended.value.code,
            capsys.readouterr().err,
            json.loads((tmp_path / "outputs" / "run" / "status.json").read_text())["state"],
        )

    return start


def test_a_full_disk_under_any_file_is_one_line(ends, tmp_path):
    """The TensorBoard writer raises an OSError that names no file."""
    file = tmp_path / "outputs" / "run" / "status.json"

    def train():
        write_state(file.parent, "running", 1, 9)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert ends(train) == (1, "failed: outputs/run: No space left on device\n", "failed")
    assert json.loads(file.read_text())["reason"] == "outputs/run: No space left on device"


@pytest.mark.parametrize("when", ["train", "close"])
def test_a_disk_that_fails_under_tensorboard_is_one_line(ends, when):
    """TensorBoard gives its file as bytes; what it has not written yet, it writes when it is closed."""

    def fail():
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), b"outputs/run/tb/events")

    said = "failed: outputs/run/tb/events: Read-only file system\n"
    assert ends(**{"train": lambda: None, when: fail}) == (1, said, "failed")


def test_a_file_in_place_of_a_folder_is_one_line(ends):
    def train():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), "outputs/run/comm_traces")  # by TorchTitan

    assert ends(train) == (1, "failed: outputs/run/comm_traces: File exists\n", "failed")


def test_a_status_that_cannot_be_written_does_not_hide_the_reason(ends, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def train():
        write_state(Path("outputs/run"), "running", 1, 9)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        write_state(Path("outputs/run"), "running", 3, 9)

    try:
        status, text, state = ends(train)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (status, state) == (1, "running")  # which reads as "interrupted" once the lock is gone
    assert text == "failed: could not write outputs/run/status.json: File too large\n"
