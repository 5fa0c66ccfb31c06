"""Loss spikes of a run."""

import math
import statistics
from collections import deque


class LossSpikes:
    """Counts loss spikes among the logged losses.

    A spike begins when a loss is not finite, or exceeds the median of the losses of the `WINDOW` steps before it by
    more than `DEVIATIONS` robust standard deviations (1.4826 times the median absolute deviation) and more than
    `MARGIN` nats. It ends with the first loss that does not. Losses in a spike do not enter the window. With fewer than
    `FEWEST` losses in the window, and in the first `WARMUP` steps, only non-finite losses count: with one
    loss in 13 steps or more, always. Log every step, so that no spike is missed.
    """

    WINDOW, FEWEST, DEVIATIONS, MARGIN, WARMUP = 50, 5, 6.0, 0.1, 10

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque()  # step, loss
        self._in_spike = False
        self.count = 0
        self._has_looked = False

    @property
    def known(self) -> int | None:
        """The count; None if it is zero because no loss ever had enough others before it."""
        return self.count if self.count or self._has_looked else None

    def update(self, step: int, loss: float) -> int:
        """Add a later step's loss; returns the spikes so far."""
        was_in_spike, self._in_spike = self._in_spike, self._is_high(step, loss)
        self.count += self._in_spike and not was_in_spike
        if not self._in_spike:
            self._recent.append((step, loss))
            while self._recent[0][0] <= step - self.WINDOW:
                self._recent.popleft()
        return self.count

    def _is_high(self, step: int, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if step <= self.WARMUP or len(self._recent) < self.FEWEST:
            return False
        self._has_looked = True
        losses = [value for _, value in self._recent]
        median = statistics.median(losses)
        spread = 1.4826 * statistics.median(abs(value - median) for value in losses)
        return loss - median > max(self.DEVIATIONS * spread, self.MARGIN)
