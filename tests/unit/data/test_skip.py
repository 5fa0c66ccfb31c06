"""`data.skip`: the next positions, however many are left out."""

import time

from hypothesis import given
from hypothesis import strategies as st

from pc_recipe.data.skip import Skip

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: f"{r[0]}-{r[0] + r[1]}"), max_size=8)


@given(words=RANGES, position=st.integers(0, 80), count=st.integers(1, 40))
def test_advance_counts_what_is_not_left_out(words, position, count):
    left_out = {p for first, last in (map(int, word.split("-")) for word in words) for p in range(first, last + 1)}
    end, kept = position, 0
    while kept < count:
        kept += end not in left_out
        end += 1
    assert Skip(words).advance(position, count) == end


def test_millions_of_positions_cost_nothing():
    skip = Skip([str(2 * i) for i in range(500_000)] + [f"2000000-{10**17}"])
    begin = time.process_time()
    for position in range(0, 10_000, 10):
        assert skip.advance(position, 5) == position + 10
    assert skip.advance(999_990, 5 + 10**6) == 2 * 10**6
    assert skip.advance(999_990, 5 + 10**6 + 1) == 10**17 + 2
    assert time.process_time() - begin < 1.0  # 1,000 calls; a linear scan takes 20 ms each
