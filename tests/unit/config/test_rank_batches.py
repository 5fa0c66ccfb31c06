"""The global batch is the same on any number of data-parallel ranks, or the error names the nearest valid sizes."""

import re

import pytest

from pc.errors import UserError
from pc_recipe.config.rank_batches import accumulation_steps

pytestmark = pytest.mark.fast


def test_error_names_values_that_do_fit():
    with pytest.raises(UserError, match=r"Nearest that fit: global_batch_size 312 or 336$") as raised:
        accumulation_steps(320, 8, 3)  # 320 is no multiple of 3: no local size can help
    for size in map(int, re.findall(r"global_batch_size (\d+) or (\d+)", str(raised.value))[0]):
        assert accumulation_steps(size, 8, 3) >= 1
    with pytest.raises(UserError, match="global_batch_size 288 or 336; or a local_batch_size that divides 40$"):
        accumulation_steps(320, 6, 8)
    assert accumulation_steps(320, 5, 8) == 8 and accumulation_steps(320, 8, 8) == 5
    with pytest.raises(UserError, match="Nearest that fit: global_batch_size 8; "):
        accumulation_steps(4, 8, 1)
