"""The global batch is the same on any number of data-parallel ranks, or the error names the nearest valid sizes."""

import re

import pytest

from pc.errors import UserError
from pc.settings.layout import accumulation_steps


@pytest.mark.parametrize("local, ranks, expected", [(8, 8, 5), (4, 8, 10), (8, 4, 10), (8, 2, 20), (8, 1, 40)])
def test_paper_batch_of_320_on_fewer_gpus(local, ranks, expected):
    assert accumulation_steps(320, local, ranks) == expected


def test_minus_one_means_no_accumulation():
    assert accumulation_steps(-1, 8, 3) == 1


def test_error_names_values_that_do_fit():
    with pytest.raises(UserError) as raised:
        accumulation_steps(320, 8, 3)
    message = str(raised.value)
    assert "global_batch_size 312 or 336" in message
    assert "2 or 4 data-parallel rank(s)" in message
    assert "local_batch_size 1" not in message  # 320 is no multiple of 3: no local size can help
    for size in map(int, re.findall(r"global_batch_size (\d+) or (\d+)", message)[0]):
        assert accumulation_steps(size, 8, 3) >= 1


def test_error_names_local_sizes():
    with pytest.raises(UserError, match="local_batch_size 5 or 8$"):
        accumulation_steps(320, 6, 8)
    assert accumulation_steps(320, 5, 8) == 8 and accumulation_steps(320, 8, 8) == 5


@pytest.mark.parametrize("arguments", [(0, 8, 1), (-2, 8, 1)])
def test_sizes_below_one(arguments):
    with pytest.raises(UserError, match="should be at least 1"):
        accumulation_steps(*arguments)
