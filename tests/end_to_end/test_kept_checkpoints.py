"""Which checkpoints a run keeps: retention, stops, and a disk that is full during an asynchronous save."""

import contextlib
import io
import json
import os
import resource
import sys
from unittest.mock import patch

from helpers import tiny
from helpers.ranks import run_ranks

OTHER_NAMES = ["step-2.keep", "best-step-1", "step-40.bad", "step-007", "notes"]


def test_retention_deletes_only_step_n(tiny_config):
    """What a user set aside in the same folder stays, and does not count as a checkpoint."""
    config, folder = tiny_config
    for name in OTHER_NAMES:
        (folder / "checkpoint" / name).mkdir(parents=True)
    words = ["--training.steps=4", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]
    run_ranks(1, tiny.train, config, words)
    # after the save of step 3 two are kept, and the last save deletes none
    assert {path.name for path in folder.glob("checkpoint/*")} == {"step-2", "step-3", "step-4", *OTHER_NAMES}


def _worker(rank, words, full_after_step=None):
    """The worker's command on a disk that is full after a step; returns its status and stderr."""
    from pc_recipe.runs import worker

    class Trainer(tiny.trainer_class()):
        def train_step(self, data):
            super().train_step(data)
            if self.step == full_after_step:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    said, status = io.StringIO(), 0
    with (
        patch.object(worker, "Trainer", Trainer),
        patch.object(sys, "argv", ["worker", *words]),
        patch.object(os, "_exit", sys.exit),
        patch.object(worker.dist, "destroy_process_group"),  # the helper's
        contextlib.redirect_stderr(said),
    ):
        try:
            worker.main()
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()


def test_a_disk_that_fills_during_an_asynchronous_save(tiny_config):
    """The next line of metrics.jsonl fails before the save is asked for: the fragment must not keep the disk full."""
    config, folder = tiny_config
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "long": "x" * 30_000}) + "\n")
    words = [str(config), "--checkpoint.async_mode=async"]
    ((status, said),) = run_ranks(1, _worker, words, 3)
    assert status == 1 and said.splitlines()[-1].startswith("failed: ") and "Traceback" not in said, said
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"
    assert not list(folder.glob("checkpoint/*"))
    ((status, said),) = run_ranks(1, _worker, words)
    assert status == 0, said
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
