"""Ranks that were started differently report the difference instead of hanging."""

import os

from helpers.ranks import run_ranks
from pc_recipe.config import Config
from pc_recipe.config.rules import error_messages


def _compare(rank, differs):
    """The error that this rank gets; with `differs`, rank 1 has other steps, another commit and other versions."""
    from pc_recipe.train import environment

    config = Config()
    if differs and rank == 1:
        os.environ["LOCAL_RANK"] = "0"  # as if on its own machine
        config.training.steps = 7
        environment.read_commit = lambda: "abc"
        environment.read_versions = lambda: {"numpy": "1.0", "torch": "1.0", "torchtitan": "1.0"}
    return "".join(error_messages(environment.require_agreement, config))


def test_equal_ranks_pass_and_differing_ranks_are_named():
    assert run_ranks(3, _compare, False) == [""] * 3
    for said in run_ranks(3, _compare, True):
        assert said.startswith("ranks 0 (on ") and " and 1 (on " in said and said.count(";") == 3  # the first four
        assert "training.steps: 10000 and 7" in said and "version of numpy: '2" in said and "commit: " in said
