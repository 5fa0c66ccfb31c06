"""The debug config itself: stopped at step 10 and resumed, it equals the straight run exactly."""

from pathlib import Path

import pytest
import torch

from helpers import tiny
from helpers.ranks import run_ranks
from pc.data.demo import make_demo

ROOT = Path(__file__).resolve().parents[2]
STEPS = 14


@pytest.mark.soak
def test_stop_at_step_ten_and_resume(tmp_path):
    data = make_demo(ROOT / "data" / "demo").folder
    words = [
        "--data.path",
        str(data),
        "--training.steps",
        str(STEPS),
        "--metrics.log_freq",
        "1",
        "--checkpoint.interval",
        "10",
    ]
    words += ["--lr_scheduler.total_steps", "60", "--job.dump_folder", str(tmp_path)]
    config = ROOT / "train_configs" / "debug.toml"
    straight = run_ranks(1, tiny.train, config, words, timeout=1200.0)[0]
    losses = tiny.metrics(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoint" / f"step-{STEPS}" / ".metadata").unlink()
    resumed = run_ranks(1, tiny.train, config, words, timeout=1200.0)[0]
    assert tiny.metrics(tmp_path) == losses[10:]
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
