"""Which rank is slow, from times that no collective hides.

In a step every rank waits for the slowest, so steps take equally long on all. Two parts of it hold no exchange between
data-parallel ranks: loading data on the host and, on the device, all from the output layer's input through the loss to the
gradient of that input. Ranks of one tensor-parallel group wait for each other there and count as one.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from pc_recipe.train import spans

ALLOWED = 0.1
"""A rank may be this far behind the median: in loading, as a share of all time; in the output layer, of the median."""


class OutputTimes:
    """Adds up a rank's own time in the output layer and the loss, forward and backward, in training.

    Args:
        model_parts: TorchTitan transformers, sharded; in a pipeline only the last stage has an output layer.
    """

    def __init__(self, model_parts: Iterable[Any]) -> None:
        self._spans = spans.Spans()
        for model in model_parts:
            if model.output is not None:
                model.output.register_forward_pre_hook(self._start)

    def take(self) -> float:
        """Seconds since the last call, as `Spans.take`."""
        return self._spans.take()

    def _start(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        hidden = inputs[0]
        if hidden.requires_grad:
            begun = spans.now()
            hidden.register_hook(lambda _: self._spans.add(begun))


def describe_slow_ranks(loading: Tensor, output: Tensor, passed: float) -> list[str]:
    """One line for each kind of work in which the slowest rank is behind.

    Args:
        loading, output: seconds of each rank, [ranks]; 0 in `output` for a rank without an output layer.
        passed: seconds in which this work was done.
    """
    median = output[output > 0].median()
    lines = []
    for work, seconds, usual, whole in (
        ("loading data", loading, loading.median(), passed),
        ("the output layer and the loss", output, median, median),
    ):
        slowest = seconds.argmax()
        if seconds[slowest] - usual > ALLOWED * whole:
            lines.append(
                f"Rank {slowest} is slow: in {passed:.3g} s it spent {seconds[slowest]:.3g} s on {work}, "
                f"the median of the ranks {usual:.3g} s"
            )
    return lines
