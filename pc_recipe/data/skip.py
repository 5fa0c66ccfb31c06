"""Positions in the order of training sequences that `data.skip` leaves out."""

from bisect import bisect_right
from collections.abc import Sequence


class Skip:
    """`data.skip`: "7" is one position, "7-9" three; the schema has checked the form. Ranges may be of any size."""

    def __init__(self, ranges: Sequence[str]) -> None:
        self._first: list[int] = []  # of each range, sorted, without overlap
        self._before: list[int] = [0]  # positions left out before each range, and in all
        self._kept: list[int] = []  # positions not left out before each range
        end = 0
        for first, last in sorted(_parse_range(text) for text in ranges):
            first = max(first, end)
            if last >= first:
                end = last + 1
                self._first.append(first)
                self._kept.append(first - self._before[-1])
                self._before.append(self._before[-1] + end - first)

    def advance(self, position: int, count: int) -> int:
        """The position after the next `count` positions that are not left out."""
        ranges = bisect_right(self._first, position)  # that begin here or before
        kept = position - self._before[ranges]
        if ranges:
            kept = max(kept, self._kept[ranges - 1])  # inside the last of them
        last = kept + count - 1  # its number among those not left out
        return last + self._before[bisect_right(self._kept, last)] + 1


def _parse_range(text: str) -> tuple[int, int]:
    """First and last position."""
    one, _, other = text.partition("-")
    ends = int(one), int(other or one)
    return min(ends), max(ends)
