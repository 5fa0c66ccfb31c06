"""Notices weights that were changed while they held PC(W): such a change would be lost, as the optimizer steps W."""

from collections.abc import Callable

import torch
from torch import Tensor

from pc.errors import UserError
from pc.shards import local
from pc.weight import Weight

TOLERANCE = 1e-6  # relative, of the norm of a shard: rounding


class ChangeCheck:
    """Compares the norms of local shards with those when PC(W) was written."""

    def __init__(self, weights: list[Weight]) -> None:
        self._weights = weights
        self._norms: Tensor | None = None
        """[weights], when PC(W) was written; None: there is nothing to compare with"""
        self._previous: tuple[Tensor, torch.Event] | None = None
        """on an accelerator, the result of the previous check, and the event of its arrival at the host"""

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_previous": None}  # without events

    def note(self) -> None:
        """PC(W) was written: keep its norms."""
        self._norms = self._measure()

    def forget(self) -> None:
        """Compare with nothing until PC(W) is written again."""
        self._norms = self._previous = None

    def require_unchanged(self, on_any_rank: Callable[[Tensor], Tensor] | None) -> None:
        """Raise a `UserError` if a weight is not the PC(W) that was written.

        Args:
            on_any_rank: whether a condition is true on any rank; None: ask about this one alone.
        """
        if self._norms is None or self._norms.is_meta:
            return
        norms = self._measure()
        same = torch.isclose(norms, self._norms.to(norms.device), rtol=TOLERANCE, atol=0.0, equal_nan=True)
        changed = (~same).any()
        if bool(changed) if on_any_rank is None else self._now_or_previous(on_any_rank(changed)):
            self._previous = None
            raise UserError(
                "a weight was changed while it held PC(W), and the optimizer steps W: load the preconditioner's state "
                "with the model's, swap averaged weights back, call pc.precondition after initialisation and DDP, give "
                "it all optimizers, and change weights between restore_raw() and write_pc()"
            )

    @torch.no_grad()
    def _measure(self) -> Tensor:
        return torch.stack(torch._foreach_norm([local(w.parameter) for w in self._weights]))

    def _now_or_previous(self, changed: Tensor) -> bool:
        """Whether something has changed; on an accelerator, whether it had at the call before this: that result has long
        arrived, so the host need not wait. An error is then raised one call late."""
        if changed.device.type == "cpu":
            return bool(changed)
        previous, self._previous = self._previous, (changed.to("cpu", non_blocking=True), torch.Event(changed.device))
        self._previous[1].record()
        if previous is None:
            return False
        result, arrival = previous
        arrival.synchronize()
        return bool(result)
