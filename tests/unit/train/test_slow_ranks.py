"""A rank's time in the output layer on a GPU, with events that the stream reaches one second apart.

`tests/distributed/test_slow_rank.py` tests it with the host's clock, and the warning.
"""

from types import SimpleNamespace

import torch
from torch import nn

from pc_recipe.train.slow_ranks import OutputTimes


class Event:
    """Like torch.cuda.Event: `elapsed_time` fails until both events are reached."""

    recorded: list["Event"] = []

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.reached = False

    def record(self) -> None:
        self.recorded.append(self)

    def synchronize(self) -> None:
        """Earlier events are reached too."""
        for event in self.recorded[: self.recorded.index(self) + 1]:
            event.reached = True

    def elapsed_time(self, end: "Event") -> float:
        assert self.reached and end.reached
        return 1000.0 * (self.recorded.index(end) - self.recorded.index(self))


def test_events_are_recorded_in_training_and_waited_for_when_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    inner, output = nn.Linear(7, 7), nn.Linear(7, 10)
    times = OutputTimes([SimpleNamespace(output=output), SimpleNamespace(output=None)])
    tokens = torch.ones(3, 7)
    for _ in range(2):
        output(inner(tokens)).sum().backward()
    with torch.no_grad():  # a validation
        output(inner(tokens))
    assert len(Event.recorded) == 4 and not any(event.reached for event in Event.recorded)
    assert times.take() == 2.0  # two micro-batches
    assert times.take() == 0.0
