"""Ranks that were started differently say so, by name, instead of hanging."""

import copy

from pc.errors import UserError
from ranks import run_ranks


def _compare(rank, change):
    from pc.titan import agreement
    from pc.titan.config import JobConfig

    mine = agreement.identity(JobConfig())
    if rank == 1:
        mine = {**copy.deepcopy(mine), **change}
    try:
        agreement.require_agreement(mine)
    except UserError as error:
        return str(error)


def test_equal_ranks_pass_and_others_are_named():
    assert run_ranks(3, _compare, {}) == [None] * 3
    change = {"training.steps": "7", "commit": "abc", "version of torch": "1.0", "content of data.path": "x", "z": "y"}
    for said in run_ranks(3, _compare, change):
        assert said.startswith("ranks 0 (on ") and " and 1 (on " in said and said.endswith("; and 1 more")
        assert "training.steps: '10000' and '7'" in said and "version of torch: '2" in said and "commit: " in said
