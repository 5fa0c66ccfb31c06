"""Ranks that were started differently report the difference instead of hanging."""

import json
import os
import subprocess

from helpers.ranks import run_ranks
from helpers.tiny import ROOT
from pc.settings import Config
from pc.settings.rules import refusal_of
from pc.titan.environment import write_environment


def _compare(rank, differs):
    """What is said to this rank; with `differs`, rank 1 has other steps, another commit and other versions."""
    from pc.titan import environment

    config = Config()
    if differs and rank == 1:
        os.environ["LOCAL_RANK"] = "0"  # on a machine of its own
        config.training.steps = 7
        environment.commit = lambda: "abc"
        environment.versions = lambda: {"numpy": "1.0", "torch": "1.0", "torchtitan": "1.0"}
    return "".join(refusal_of(environment.require_agreement, config))


def test_equal_ranks_pass_and_others_are_named():
    assert run_ranks(3, _compare, False) == [""] * 3
    for said in run_ranks(3, _compare, True):
        assert said.startswith("ranks 0 (on ") and " and 1 (on " in said and said.count(";") == 3  # the first four
        assert "training.steps: 10000 and 7" in said and "version of numpy: '2" in said and "commit: " in said


def test_the_environment_says_commit_and_data(tmp_path, tiny_shards):
    config = Config()
    config.data.path = str(tiny_shards)
    write_environment(tmp_path, config, 2)
    written = json.loads((tmp_path / "environment.json").read_text())
    content = json.loads((tiny_shards / "manifest.json").read_text())["configuration_sha256"]
    assert written["data"]["content of data.path"] == content and written["world_size"] == 2
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT).returncode == 1
    assert written["commit"] == (git.stdout.strip() + "+" * changed if git.returncode == 0 else None)
