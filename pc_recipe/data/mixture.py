"""Several data folders in one order: a stateless map, position → folder and position in it.

Every `CYCLE` positions hold each folder's share exactly, in a seeded shuffle; a folder's own sequences come in its own
order. So the order does not depend on ranks, and one number, the position, resumes all folders.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

import numpy as np

from pc.errors import UserError
from pc_recipe.data.order import shuffled

CYCLE = 10_000  # weights are rounded to this many shares


class Mixture:
    """weights: {folder: weight}, of any sum; counts: positions of each folder in a cycle [folders]."""

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        ends = [round(CYCLE * end / sum(weights.values())) for end in accumulate(weights.values())]
        self.counts = np.diff([0, *ends])
        self._ends, self._seed = tuple(ends), seed
        for folder, count in zip(weights, self.counts, strict=True):
            if count == 0:
                raise UserError(f"data.path: the weight of {folder} is less than 1/{CYCLE} of the sum; leave it out")

    def locate(self, position: int) -> tuple[int, int]:
        """(number of the folder, position in its own order)"""
        cycle, place = divmod(position, CYCLE)
        before, after = _count_used_in_cycle(self._ends, self._seed, cycle)[place : place + 2]
        folder = int(np.argmax(after - before))
        return folder, int(cycle * self.counts[folder] + before[folder])


@lru_cache(maxsize=4)  # 50 ms each; ranks are within one or two cycles
def _count_used_in_cycle(ends: tuple[int, ...], seed: int, cycle: int) -> np.ndarray:
    """Positions of each folder before each place of a cycle [CYCLE + 1, folders]."""
    chosen = np.zeros((CYCLE + 1, len(ends)), dtype=np.int64)
    for place in range(CYCLE):
        # negative epochs: the shuffles of the folders themselves use the others
        chosen[place + 1, bisect_right(ends, shuffled(place, CYCLE, seed, -1 - cycle))] = 1
    return chosen.cumsum(axis=0)
