"""The shuffle is a bijection for every n, differs by seed and epoch, and mixes well."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc.data.order import shuffled


def permutation(n: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return [shuffled(i, n, seed, epoch) for i in range(n)]


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_every_item_comes_once(n, seed, epoch):
    assert sorted(permutation(n, seed, epoch)) == list(range(n))


def test_large_n_is_covered_without_memory():
    n = 20_000_000
    items = [shuffled(i, n, seed=1, epoch=0) for i in range(2000)]
    assert len(set(items)) == 2000 and all(0 <= i < n for i in items)
    assert max(items) > 0.99 * n and min(items) < 0.01 * n


def test_seed_and_epoch_change_the_order():
    orders = {tuple(permutation(500, seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6


def test_neighbours_are_separated_as_in_a_random_permutation():
    # A random permutation of n leaves each of n - 1 neighbouring pairs adjacent with probability 2/n:
    # about 2 in total, and 12 or more with a probability below 1e-5. The identity has n - 1.
    order = permutation(5000)
    assert sum(abs(a - b) == 1 for a, b in zip(order, order[1:], strict=False)) < 12


def test_first_item_is_spread_evenly_over_seeds():
    # 4000 draws into 20 cells: chi-square with 19 degrees of freedom exceeds 55 with probability 2e-5.
    counts = Counter(shuffled(0, 1000, seed, 0) // 50 for seed in range(4000))
    assert sum((counts[cell] - 200) ** 2 / 200 for cell in range(20)) < 55


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position):
    with pytest.raises(IndexError):
        shuffled(position, 10, 0, 0)
