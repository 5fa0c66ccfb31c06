"""Faults of real runs, each in processes of its own: what is lost, and what the last line says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from small_config import ROOT, write_small_config

pytestmark = pytest.mark.soak


@pytest.fixture
def small(tmp_path, tiny_shards):
    """Train a small config to its end in processes of its own: call it with further words."""
    config = write_small_config(tmp_path / "small.toml", tiny_shards, steps=4, interval=2)

    def train(*words: str, processes: int = 1) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pc.launch.local", str(config), f"--job.dump_folder={tmp_path}/run"]
        command += ["--training.local_batch_size=1", *words]
        environment = {**os.environ, "NGPU": str(processes)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    train.folder = tmp_path / "run"
    return train


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damage_on_two_processes(small):
    assert small(processes=2).returncode == 0
    straight = tiny.metrics(small.folder)
    newest = small.folder / "checkpoint" / "step-4"
    flip_a_bit(newest / "__1_0.distcp")
    (small.folder / "metrics.jsonl").unlink()
    resumed = small(processes=2)
    assert resumed.returncode == 0
    assert f"{newest} is not used: {newest}/__1_0.distcp: damaged" in resumed.stdout
    assert f"were set aside in {small.folder}/checkpoint.damaged: step-4" in resumed.stdout
    assert tiny.metrics(small.folder) == straight[2:]
    for folder in (small.folder / "checkpoint").iterdir():
        flip_a_bit(folder / "__0_0.distcp")
    refused = small(processes=2)
    assert refused.returncode == 2
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("error: ") and last.endswith(f"no other checkpoint in {small.folder}/checkpoint is whole")
