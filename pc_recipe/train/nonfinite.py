"""Skips steps whose loss or gradient norm is not finite, equally on all ranks, and stops after several in a row."""

from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.tools.logging import logger

from pc.errors import UserError
from pc.preconditioner import Preconditioner
from pc.shards import local
from pc.targets import clean_name

NAMES_SHOWN = 4


class Diverged(UserError):
    """The loss or the gradients were not finite in too many steps in a row."""


class FiniteSteps:
    """Decides for every step whether to skip it.

    Args:
        model_parts: this rank's sharded model parts.
        preconditioner: PC's.
        limit: stop the run after this many skipped steps in a row.
    """

    def __init__(self, model_parts: list[nn.Module], preconditioner: Preconditioner | None, limit: int) -> None:
        self._model_parts, self._preconditioner, self._limit = model_parts, preconditioner, limit
        self.count = 0
        """of skipped steps so far"""
        self._in_a_row = self._first_position = 0

    @torch.no_grad()
    def skips(self, step: int, loss: Tensor, positions: range) -> bool:
        """Whether to skip this step. All ranks call it, with complete gradients, before clipping.

        The host waits for the answer, as TorchTitan does for the gradient norm of a step that it logs.

        Args:
            loss: this rank's loss of the whole step, a scalar.
            positions: of the step's sequences in the order of the data.

        Raises:
            Diverged: it is the last of `limit` such steps in a row.
        """
        if self._is_finite(loss):
            self._in_a_row = 0
            return False
        self.count += 1
        self._in_a_row += 1
        self._first_position = positions.start if self._in_a_row == 1 else self._first_position
        logger.warning(
            f"Step {step} is skipped: its loss or gradient norm is not finite ({self.count} so far; data positions "
            f"{positions.start}-{positions.stop - 1})"
        )
        if self._in_a_row >= self._limit:
            raise Diverged(
                f"the loss or the gradient norm was not finite in {self._in_a_row} steps in a row, up to step "
                f"{step}; data positions {self._first_position}-{positions.stop - 1}; not finite now: {self._names()}. "
                "None of these steps changed the weights or a checkpoint; lower optimizer.lr, or skip data with data.skip"
            )
        return True

    def _is_finite(self, loss: Tensor) -> bool:
        """Whether the squared gradient norm plus the loss, summed over all ranks, is finite."""
        gradients = [local(p.grad) for model in self._model_parts for p in model.parameters() if p.grad is not None]
        norms = torch._foreach_norm(gradients)
        total = torch.stack([loss.float().reshape(()), *(norm.float().square() for norm in norms)]).sum()
        dist.all_reduce(total)
        return bool(total.isfinite())

    def _names(self) -> str:
        """Some of the tensors of all ranks that are not finite."""
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, list(self._not_finite()))
        return ", ".join(list(dict.fromkeys(chain(*found)))[:NAMES_SHOWN]) or "nothing"

    def _not_finite(self) -> Iterator[str]:
        """Names of this rank's: W first, then PC(W) of a finite W and other parameters, then gradients."""
        parameters = [(clean_name(name), p) for model in self._model_parts for name, p in model.named_parameters()]
        raws = (
            {}
            if self._preconditioner is None
            else {f"{n}.weight": s.raw for n, s in self._preconditioner.weights.items()}
        )
        bad = [name for name, raw in raws.items() if _bad(raw)]
        yield from bad
        for name, parameter in parameters:
            if name not in bad and _bad(parameter):
                is_pc = name in raws
                yield f"PC of {name} (largest weight {local(raws[name]).abs().max():.1e})" if is_pc else name
        yield from (f"gradient of {name}" for name, p in parameters if p.grad is not None and _bad(p.grad))


def _bad(tensor: Tensor) -> bool:
    return not bool(local(tensor).isfinite().all())
