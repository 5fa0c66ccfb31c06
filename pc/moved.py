"""Who moves W, found by values: version counters miss changes through `.data` and by fused optimizers, and an optimizer with
parameters of its own moves nothing.

Nothing here waits for the device or asks other ranks. Each rank compares its own shards, in two reads of W a step. What it
finds is a number on the device, which the host reads once it has arrived: in the same call on a CPU, else a step later.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pc.errors import UserError
from pc.shards import local
from pc.weight import Weight

LOOKS, STUCK = 32, 16
"""An optimizer is wrong if W should have moved in 16 of its first 32 steps and did not in any. Some leave out their first
step, as SOAP, or add up the gradients of several."""
MAKE_IT_LATER = (
    "call preconditioner = pc.precondition(model) first, make it from model.parameters(), and call "
    "preconditioner.write_pc() after each step"
)
"""What an optimizer needs that cannot be followed."""


class Arrival:
    """The largest of the numbers [] given so far, as far as the host knows it: 0 until one has arrived."""

    def __init__(self) -> None:
        self._largest: Tensor | None = None
        self._copy: tuple[Tensor, Any] | None = None

    def add(self, number: Tensor) -> None:
        self._largest = number if self._largest is None else torch.maximum(self._largest, number)

    def value(self) -> int:
        """Does not wait: copies the largest to the host, and reads the copy in a later call if it is not there yet."""
        if self._copy is None and self._largest is not None:
            copy = self._largest.to("cpu", non_blocking=True)  # pinned, from a GPU
            event = None if self._largest.device.type == "cpu" else torch.Event(self._largest.device)
            if event is not None:
                event.record()
            self._copy = copy, event
        if self._copy is None or (self._copy[1] is not None and not self._copy[1].query()):
            return 0
        copy, self._copy = self._copy[0], None
        return int(copy)


@torch.no_grad()
def prints(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each tensor's shard on this rank, [n] int64: equal for equal values, on any number of threads."""
    shards = [local(tensor.detach()) for tensor in tensors]
    # by row, and then a sum: alone, `hash_tensor` is a sum modulo 2, in which equal rows cancel
    return torch.stack(
        [
            torch.hash_tensor(shard, dim=-1).view(torch.int64).sum()
            if shard.numel()
            else shard.new_zeros((), dtype=torch.int64)
            for shard in shards
        ]
    )


class Moves:
    """Compares W and gamma of a model with what they were.

    Args:
        weights: by name.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights
        self._found = Arrival()
        """1: nothing; 2 + k: tensor k of `prints` moved unseen; 2 + 2 n + k: W of weight k, of n, is stuck"""
        self._written: tuple[Any, Tensor] | None = None
        self._looks = Counter[Optimizer]()
        self._before: tuple[Tensor, Tensor] | None = None
        """of the step that is being taken: prints of each W, and whether it should move"""
        self._versions: list[tuple[int, int]] = []
        """of PC(W), in the same step"""
        self._stuck: Tensor | None = None
        """for each weight: in how many looks it should have moved and did not, -1 once it has"""
        self._optimizer = ""
        """the class of the last that stepped"""

    def note_written(self) -> None:
        """Call it when `weight` is PC(W)."""
        self._written = self._kind(), self.prints()
        if self._versions:  # within a step, as by a closure or another thread
            self._versions = self._versions_of_pc()

    def prints(self) -> Tensor:
        """Of each W, then of each gamma."""
        weights = self._weights.values()
        return prints([*(w.orig for w in weights), *(w.gamma for w in weights if w.gamma is not None)])

    def look(self) -> None:
        """Before gradients are pulled back: find whether W or gamma has moved since `note_written`.

        Raises:
            UserError: that, or a stuck W, was found now or earlier. It is said once.
        """
        if self._written is not None and self._written[0] == self._kind():
            self._add(self._written[1] != self.prints(), 0)
        self._require_nothing_found()

    def before_step(self, optimizer: Optimizer) -> None:
        """Once its gradients are there; again after a closure, and by a step that calls its base class's."""
        self._optimizer, self._versions = type(optimizer).__name__, self._versions_of_pc()
        if self._looks[optimizer] < LOOKS:
            origs = [weight.orig for weight in self._weights.values()]
            should = torch.stack([_should_move(orig, optimizer) for orig in origs])
            self._before = (prints(origs), should) if self._before is None else (self._before[0], should)

    def after_step(self, optimizer: Optimizer) -> str:
        """Before PC(W) is written. Returns an error, if the step has moved PC(W)."""
        changes = zip(
            self._weights, self._versions, self._versions_of_pc()
        )  # of no weight, if the parent's step has ended
        changed, self._versions = [name for name, *both in changes if both[0] != both[1]], []
        if self._before is not None:
            before, should = self._before
            has_moved = before != prints([weight.orig for weight in self._weights.values()])
            stuck = torch.zeros_like(before) if self._stuck is None else self._stuck
            self._stuck = torch.where(has_moved | (stuck < 0), -1, stuck + should)
            self._looks[optimizer] += 1
            self._before = None
            self._add(self._stuck >= STUCK, 2 * len(self._weights))
        if not changed:
            return ""
        return (
            f"{self._optimizer} has moved PC(W) of {changed[0]}, not W; it has parameters of its own: {MAKE_IT_LATER}"
        )

    def _versions_of_pc(self) -> list[tuple[int, int]]:
        return [(w.effective._version, local(w.effective)._version) for w in self._weights.values()]

    def start_again(self) -> None:
        """Other optimizers are followed."""
        self._looks.clear()
        self._stuck = None

    def _kind(self) -> tuple:
        """`model.float()` changes values, and PC(W) with them."""
        first = next(iter(self._weights.values())).orig
        return first.dtype, first.device

    def _add(self, is_so: Tensor, offset: int) -> None:
        self._found.add(torch.where(is_so.any(), is_so.to(torch.int8).argmax() + offset + 2, 1))

    def _require_nothing_found(self) -> None:
        found, names = self._found.value() - 2, [*self._weights]
        if found < 0:
            return
        self._found = Arrival()
        if found < 2 * len(names):
            raise UserError(
                f"W of {names[found % len(names)]} was changed after PC(W) was written, through `.data`, by a wrapper around "
                f"{self._optimizer or 'an optimizer'} or by one that is not followed: call preconditioner.write_pc() after it"
            )
        raise UserError(
            f"{self._optimizer} has not moved W of {names[found - 2 * len(names)]} in {STUCK} steps with a gradient and a "
            f"rate; it may have parameters of its own: {MAKE_IT_LATER}"
        )


def _should_move(orig: Tensor, optimizer: Optimizer) -> Tensor:
    """Whether a step should move a weight [], or its shard on this rank: the update, of the size of the gradient (as by SGD) or 1
    (as by Adam) times the rate, does not vanish beside the weight's largest entry."""
    shard = local(orig.detach())
    group = next((g for g in optimizer.param_groups if any(p is orig for p in g["params"][:])), None)
    if group is None or orig.grad is None or not shard.numel():
        return torch.zeros((), dtype=torch.bool, device=shard.device)
    gradient = torch.linalg.vector_norm(local(orig.grad), torch.inf)
    update = gradient.clamp(max=1.0) * group.get("lr", 1.0)
    should = gradient.isfinite() & (update > torch.finfo(shard.dtype).eps * torch.linalg.vector_norm(shard, torch.inf))
    found_inf = getattr(optimizer, "found_inf", None)  # a fused step under a gradient scaler, which may do nothing
    return should if found_inf is None else should & (found_inf == 0)
