"""Collectives of a step: calls and bytes of each kind, by wrapping torch's functions.

FSDP gathers weights and reduces gradients through these functions, and `pc.owner` exchanges matrices. Collectives of
DTensor itself (tensor parallelism, the gradient norm) are not counted.
"""

import contextlib
import functools
import inspect
from collections import defaultdict
from unittest import mock

import torch.distributed as dist

# Name: its purpose in a step, which argument is the full tensor, how often a rank sends the others' part of it (in a
# ring, the minimum). Torch 2.13 renamed two.
KINDS = {
    "all_gather_into_tensor": ("gather weights", 0, 1),
    "all_gather_single": ("gather weights", 0, 1),
    "reduce_scatter_tensor": ("reduce gradients", 1, 1),
    "reduce_scatter_single": ("reduce gradients", 1, 1),
    "all_reduce": ("all-reduce", 0, 2),
    "all_to_all_single": ("PC and Muon", 1, 1),
}


class Collectives(contextlib.ExitStack):
    """Counts the collectives within a `with`."""

    def __enter__(self) -> "Collectives":
        self._totals: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0, "bytes": 0.0})
        present = {name: self._counted(name) for name in KINDS if hasattr(dist, name)}
        self.enter_context(mock.patch.multiple(dist, **present))
        return self

    def totals(self) -> dict[str, dict[str, float]]:
        """{purpose: calls, and bytes sent by this rank}."""
        return dict(self._totals)

    def _counted(self, name: str):
        original, (kind, which, times) = getattr(dist, name), KINDS[name]
        signature = inspect.signature(original)

        @functools.wraps(original)
        def counted(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            whole, ranks = list(given.values())[which], dist.get_world_size(given.get("group"))
            self._totals[kind]["calls"] += 1
            self._totals[kind]["bytes"] += times * whole.numel() * whole.element_size() * (1 - 1 / ranks)
            return original(*args, **kwargs)

        return counted
