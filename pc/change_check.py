"""Notices weights that were changed while they held PC(W): such a change would be lost, as the optimizer steps W."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pc.errors import UserError
from pc.shards import local
from pc.weight import Weight

# How far the norm of a shard may be from that of the PC(W) that was written, relative to it: rounding.
TOLERANCE = 1e-6


class ChangeCheck:
    """Compares the norms of local shards with those when PC(W) was written.

    Args:
        replicas: ranks that have the same weights, if weights are not sharded.
    """

    def __init__(self, weights: list[Weight], replicas: dist.ProcessGroup | None) -> None:
        self._weights, self._replicas = weights, replicas
        self._norms: Tensor | None = None
        """[weights]; None: there is nothing to compare with"""
        self._last: tuple[Tensor, torch.Event] | None = None
        """an accelerator's last answer on its way to the host, and its arrival"""

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_replicas": None, "_last": None}  # without process groups and events

    def note(self) -> None:
        """PC(W) was written."""
        self._norms = self._measure()

    def forget(self) -> None:
        """The weights hold another PC(W), which may differ by rounding from what they will hold."""
        self._norms = self._last = None

    def require_unchanged(self, alone: bool = False) -> None:
        """Raise a `UserError` on all ranks if on any a weight is not the PC(W) that was written, or on this one
        `alone`."""
        if self._norms is None or self._norms.is_meta:
            return
        norms = self._measure()
        same = torch.isclose(norms, self._norms.to(norms.device), rtol=TOLERANCE, atol=0.0, equal_nan=True)
        changed = (~same).any().float()
        meshes = [w.parameter.device_mesh for w in self._weights if isinstance(w.parameter, DTensor)]
        groups = meshes[0].get_all_groups() if meshes else [self._replicas] if self._replicas else []
        for group in [] if alone else groups:
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
        if bool(changed) if alone else self._answer_or_previous(changed):
            self._last = None
            raise UserError(
                "a weight was changed while it held PC(W), and the optimizer steps W: load the preconditioner's state "
                "with the model's, swap averaged weights back, call pc.precondition after initialisation and DDP, give "
                "it all optimizers, and change weights between restore_raw() and write_pc()"
            )

    @torch.no_grad()
    def _measure(self) -> Tensor:
        return torch.stack(torch._foreach_norm([local(w.parameter) for w in self._weights]))

    def _answer_or_previous(self, answer: Tensor) -> bool:
        """On an accelerator, whether the answer of the call before was true: it has long arrived, so the host need not
        wait. An error is then raised some calls later."""
        if answer.device.type == "cpu":
            return bool(answer)
        last, self._last = self._last, (answer.to("cpu", non_blocking=True), torch.Event(answer.device))
        self._last[1].record()
        if last is None:
            return False
        before, arrival = last
        arrival.synchronize()
        return bool(before)
