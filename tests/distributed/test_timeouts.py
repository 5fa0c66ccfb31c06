"""After its first step a run waits at most `comm.train_timeout_seconds`, set by torch's public function if there is one."""

import pytest

from helpers.ranks import run_ranks
from helpers.tiny import make_trainer, write_config

SECONDS = 77
WORDS = f"--training.steps=1 --checkpoint.enable=false --comm.train_timeout_seconds={SECONDS}".split()


def _timeouts_of_a_step(rank, config, has_public):
    """Seconds of each call of torch's public function, or without one those of each group afterwards."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    calls = []
    if has_public:  # as in a torch without the deprecated private function
        del distributed_c10d._set_pg_timeout
        dist.set_timeout = lambda timeout, group: calls.append(timeout.seconds)
    make_trainer(config, WORDS).train()
    groups = [group for group in distributed_c10d._world.pg_map if dist.get_backend(group) == "gloo"]
    found = [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in groups]
    return calls if has_public else found


@pytest.mark.parametrize("has_public", [False, True])
def test_all_groups_have_the_timeout_after_the_first_step(tmp_path, tiny_shards, has_public):
    config = write_config(tmp_path / "run.toml", tiny_shards, tmp_path / "run")
    [seconds] = run_ranks(1, _timeouts_of_a_step, config, has_public)
    assert len(seconds) >= 2 and set(seconds) == {SECONDS}
