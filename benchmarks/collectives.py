"""What the processes of a step exchange: calls, bytes and time of every kind of collective, by wrapping torch's own.

FSDP gathers weights and reduces gradients through these functions, and `pc.owner` exchanges matrices. What DTensor
does on its own (tensor parallelism, the gradient norm) is not counted.
"""

import functools
import inspect
from collections import defaultdict
from unittest import mock

import torch.distributed as dist

# Name: what it does in a step, which argument is the whole tensor, how often a rank sends the others' part of it (a
# ring does, which is the least there can be). Torch 2.13 has new names for two.
KINDS = {
    "all_gather_into_tensor": ("gather weights", 0, 1),
    "all_gather_single": ("gather weights", 0, 1),
    "reduce_scatter_tensor": ("reduce gradients", 1, 1),
    "reduce_scatter_single": ("reduce gradients", 1, 1),
    "all_reduce": ("all-reduce", 0, 2),
    "all_to_all_single": ("PC and Muon", 1, 1),
}


class Collectives:
    """Counts the collectives within a `with`.

    Args:
        now: the time of this moment, for `seconds`.
        seconds: between two such moments, called after the work.
    """

    def __init__(self, now=lambda: None, seconds=lambda start, end: 0.0) -> None:
        self._now, self._seconds = now, seconds
        self._calls: list[tuple[str, float, object, object]] = []
        self._patches = [mock.patch.object(dist, name, self._counted(name)) for name in KINDS if hasattr(dist, name)]

    def __enter__(self) -> "Collectives":
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_) -> None:
        for patch in self._patches:
            patch.stop()

    def totals(self) -> dict[str, dict[str, float]]:
        """By what it is for: calls, bytes that this rank sends, seconds."""
        result: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0, "bytes": 0.0, "seconds": 0.0})
        for kind, size, start, end in self._calls:
            result[kind]["calls"] += 1
            result[kind]["bytes"] += size
            result[kind]["seconds"] += self._seconds(start, end)
        return dict(result)

    def _counted(self, name: str):
        original, (kind, which, times) = getattr(dist, name), KINDS[name]
        signature = inspect.signature(original)

        @functools.wraps(original)
        def counted(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            whole, ranks = list(given.values())[which], dist.get_world_size(given.get("group"))
            size = times * whole.numel() * whole.element_size() * (1 - 1 / ranks)
            start = self._now()
            result = original(*args, **kwargs)
            self._calls.append((kind, size, start, self._now()))
            return result

        return counted
