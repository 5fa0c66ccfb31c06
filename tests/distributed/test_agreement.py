"""Ranks that were started differently report the difference instead of hanging."""

import copy
import json
import subprocess

from helpers.ranks import run_ranks
from helpers.tiny import ROOT
from pc.errors import UserError
from pc.settings import Config
from pc.titan.environment import write_environment


def _compare(rank, change):
    from pc.settings import Config
    from pc.titan import environment

    mine = environment.identity(Config())
    if rank == 1:
        mine = {**copy.deepcopy(mine), **change}
    try:
        environment.require_agreement(mine)
    except UserError as error:
        return str(error)


def test_equal_ranks_pass_and_others_are_named():
    assert run_ranks(3, _compare, {}) == [None] * 3
    versions = {f"version of {name}": "1.0" for name in ("numpy", "torch", "torchtitan")}
    change = {"training.steps": "7", "commit": "abc", **versions}
    for said in run_ranks(3, _compare, change):
        assert said.startswith("ranks 0 (on ") and " and 1 (on " in said and said.endswith("; and 1 more")
        assert "training.steps: 10000 and '7'" in said and "version of torch: '2" in said and "commit: " in said


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
