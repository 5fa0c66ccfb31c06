"""The ranks that wait in a collective name the rank that does not join it."""

import os
import re
import time

import pytest

from helpers import tiny
from helpers.ranks import run_ranks


def _one_sleeps(rank, config, overrides):
    from pc.launch.worker import Trainer
    from pc.titan import hangs

    hangs.SECONDS, step = 1.0, Trainer.train_step

    def train_step(self, data_iterator):
        if self.step == 3 and rank == 1:
            time.sleep(5.0)
            os._exit(0)  # a normal exit would fail on the closed connection
        step(self, data_iterator)

    Trainer.train_step = train_step
    tiny.train(rank, config, overrides)


@pytest.mark.soak
def test_a_rank_that_does_not_come_is_named(tiny_config):
    config, _ = tiny_config
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, _one_sleeps, config, ["--comm.train_timeout_seconds=2"])
    said = str(raised.value).rstrip().splitlines()[-1].partition("CollectiveHangs: ")[2]
    assert re.fullmatch(
        r"wait_tensor \(\w+, distributed/utils.py:\d+\) timed out in step 3; "
        r"these ranks did not reach it: 1 \(on \S+\)",
        said,
    ), str(raised.value)
