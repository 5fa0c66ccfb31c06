"""The shipped overlays on a small run: their settings apply, and an asynchronous checkpoint is saved."""

import os
import subprocess
import sys

import pytest

from helpers.tiny import ROOT, metrics, write_small_config
from pc_recipe.config import load_config
from pc_recipe.files.run_folder import list_checkpoints, read_state

OVERLAYS = ROOT / "train_configs" / "overlays"


@pytest.mark.soak
def test_both_overlays_on_four_processes(tmp_path, tiny_shards):
    config = write_small_config(tmp_path / "run.toml", tiny_shards, steps=4, interval=2)  # the overlay's is longer
    words = ["--training.global_batch_size=8"]
    words += [f"--overlay={OVERLAYS / '8_nodes.toml'}", f"--overlay={OVERLAYS / '24gb.toml'}"]
    words += ["--parallelism.data_parallel_replicate_degree=2", "--checkpoint.async_mode=async"]  # 4 CPUs, no GPU
    command = [sys.executable, "-m", "pc_recipe.runs.local", str(config), *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NGPU": "4"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "run"
    resolved = load_config(run / "config.toml")
    assert resolved.training.local_batch_size == 2  # 8 on 4 ranks
    assert resolved.activation_checkpoint.mode == "full" and resolved.parallelism.fsdp_sync == "micro_batch"
    assert resolved.comm.init_timeout_seconds == 1800
    assert read_state(run).state == "finished" and len(metrics(run)) == 4
    assert resolved.checkpoint.interval == 2000 and list(list_checkpoints(run / "checkpoint")) == [4]
