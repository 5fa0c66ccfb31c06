"""The global batch is the same on any number of data-parallel ranks, or the error names the nearest valid sizes."""

import re

import pytest

from pc.errors import UserError
from pc_recipe.config.rank_batches import Degrees, RankBatches
from pc_recipe.config.schema import Training

pytestmark = pytest.mark.fast


def _micro_batches(batch: int, size: int, ranks: int) -> int:
    dims = Degrees(dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, world_size=ranks)
    return RankBatches(dims, Training(global_batch_size=batch, local_batch_size=size)).micro_batches


def test_error_names_values_that_do_fit():
    with pytest.raises(UserError, match=r"Nearest that fit: global_batch_size 312 or 336$") as raised:
        _micro_batches(320, 8, 3)  # 320 is no multiple of 3: no local size can help
    for size in map(int, re.findall(r"global_batch_size (\d+) or (\d+)", str(raised.value))[0]):
        assert _micro_batches(size, 8, 3) >= 1
    with pytest.raises(UserError, match="global_batch_size 288 or 336; or a local_batch_size that divides 40$"):
        _micro_batches(320, 6, 8)
    assert _micro_batches(320, 5, 8) == 8 and _micro_batches(320, 8, 8) == 5
    with pytest.raises(UserError, match="Nearest that fit: global_batch_size 8; "):
        _micro_batches(4, 8, 1)
