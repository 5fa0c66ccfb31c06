"""Data of the paper's size has thousands of shards: what a process holds must not grow with them."""

import os
import resource

import pytest

from helpers.sparse_shards import make_sparse
from pc_recipe.data.loader import GlobalOrderLoader

SETTINGS = dict(seq_len=8, local_batch_size=4, dp_rank=0, dp_world_size=1, vocab_size=32000)


@pytest.fixture
def few_descriptors():
    """Only 128 more than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 128, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_shards_than_descriptors(tmp_path, few_descriptors):
    folder = make_sparse(tmp_path, train=600, validation=0, tokens=64).folder
    iterator = iter(GlobalOrderLoader(folder, **SETTINGS))
    before = None
    for _ in range(600):
        next(iterator)
        held = len(os.listdir("/proc/self/fd")), len(open("/proc/self/maps").readlines())
        before = before or held
    assert held[0] <= before[0] + 8 and held[1] <= before[1] + 40
