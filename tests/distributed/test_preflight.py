"""The preflight names the rank that is slower, and what differs."""

import time

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_ranks
from pc_recipe.runs import preflight

SMALL = preflight.Sizes(matrix=64, exchange=2**16, file=2**16)


def _measure(rank, folder, slow):
    """What all ranks found, with rank 1 held up in one action, with a late clock, and with another version."""
    if rank == 1:
        action = {"matmul": (torch, "mm"), "pairs": (dist, "batch_isend_irecv")}[slow]
        fast = getattr(*action)
        setattr(*action, lambda *given: (time.sleep(0.05), fast(*given))[1])
        preflight.read_commit = lambda: "other"
        clock = time.time
        time.time = lambda: clock() - 100
    return preflight.measure(folder, torch.device("cpu"), SMALL)


@pytest.mark.parametrize("ranks, slow", [(2, "matmul"), (4, "pairs")])
def test_the_slow_rank_is_named(tmp_path, ranks, slow):
    everyone = run_ranks(ranks, _measure, tmp_path, slow)[0]
    lines = preflight.find_slow_ranks(everyone)
    assert any(line.startswith("rank 1 (on ") and f"{slow} " in line and "below the median" in line for line in lines)
    assert any(line.startswith("rank 1 ") and "its clock is -" in line and "off rank 0's" in line for line in lines)
    assert any(line.startswith("rank 1 ") and "commit other, on rank 0" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_equal_ranks_are_not_named():
    """At 9 % behind no rank is named, at 11 % one is."""

    def rank(rate: float) -> preflight.Rank:
        return preflight.Rank("here", {"matmul TFLOP/s": rate, "all-reduce GB/s": rate}, 0.0, {"torch": "2"})

    assert preflight.find_slow_ranks([rank(1.0), rank(0.91), rank(1.0)]) == []
    [line] = preflight.find_slow_ranks([rank(1.0), rank(0.89)])
    assert line == "rank 1 (on here): matmul TFLOP/s 0.89, 11% below the median 1"
