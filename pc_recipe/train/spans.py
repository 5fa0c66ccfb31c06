"""How long a part of the training takes on the device, without waiting for it in between."""

import time
from typing import Any

import torch


class Spans:
    """Adds up the time between `begin` and `end`, which may be hooks of an optimizer; `add` where spans overlap."""

    def __init__(self) -> None:
        self._spans: list[tuple] = []
        self._begun: Any = None

    def begin(self, *_: Any) -> None:
        self._begun = now()

    def end(self, *_: Any) -> None:
        self.add(self._begun)

    def add(self, begun: Any) -> None:
        """A span from `begun`, which `now` returned, to this moment."""
        self._spans.append((begun, now()))

    def take(self) -> float:
        """Seconds since the last call. The device has finished this work, or the host waits for it."""
        spans, self._spans = self._spans, []
        return sum(_seconds(*span) for span in spans)


def now() -> Any:
    """A time on the GPU, taken without waiting, or on the host if there is none."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()  # else `elapsed_time` may fail
    return begin.elapsed_time(end) / 1000
