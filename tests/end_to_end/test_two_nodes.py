"""Two machines without SLURM: the same command on each, through the launcher."""

import os
import subprocess
import sys
import tomllib

import pytest

from helpers.tiny import ROOT, metrics, write_small_config
from pc_recipe.files.run_folder import read_state


@pytest.mark.soak
def test_the_same_command_on_each_node(tmp_path, tiny_shards):
    config = write_small_config(tmp_path / "run.toml", tiny_shards, steps=4, interval=4)
    words = [sys.executable, "-m", "pc_recipe.runs.local", str(config), "--training.local_batch_size=-1"]
    place = {"NGPU": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    nodes = [
        subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | place | {"NODE_RANK": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in (0, 1)
    ]
    said = [node.communicate(timeout=300)[0].decode() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    run = tmp_path / "run"
    assert read_state(run).state == "finished" and len(metrics(run)) == 4
    assert tomllib.loads((run / "config.toml").read_text())["training"]["local_batch_size"] == 1  # 2 on 2 nodes
    assert "Finished at step 4" in said[0] and "Finished" not in said[1]
