"""A rank's time in the output layer, on a GPU with events that the stream reaches one second apart; and which rank is slow."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pc_recipe.train import spans
from pc_recipe.train.slow_ranks import OutputTimes, describe_slow_ranks


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


def test_without_a_gpu_the_host_measures(monkeypatch):
    monkeypatch.setattr(spans, "now", iter([10.0, 10.5, 20.0, 22.0]).__next__)
    output = nn.Linear(7, 10)
    times = OutputTimes([SimpleNamespace(output=output)])
    for _ in range(2):
        output(torch.ones(3, 7, requires_grad=True)).sum().backward()
    assert times.take() == 2.5


@pytest.mark.parametrize(
    "loading, output, work",
    [
        ([1.0, 2.1, 1.0], [5.0, 5.0, 5.0], "2.1 s on loading data, the median of the ranks 1 s"),  # above 10 % of 10 s
        ([1.0, 1.9, 1.0], [5.0, 5.0, 5.0], ""),
        ([1.0, 1.0, 1.0], [5.0, 5.6, 5.0], "5.6 s on the output layer and the loss, the median of the ranks 5 s"),
        ([1.0, 1.0, 1.0], [5.0, 5.4, 5.0], ""),  # below 10 % of the median
        ([1.0, 1.0, 1.0], [0.0, 5.4, 5.0], ""),  # a pipeline stage without an output layer
    ],
)
def test_a_rank_that_is_behind_is_named_with_its_work(loading, output, work):
    lines = describe_slow_ranks(torch.tensor(loading), torch.tensor(output), 10.0)
    assert lines == ([f"Rank 1 is slow: in 10 s it spent {work}"] if work else [])
