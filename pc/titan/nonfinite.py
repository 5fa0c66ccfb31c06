"""Skips steps whose loss or gradient norm is not finite, on all ranks, and logs them.

One number decides: the squared gradient norm plus the loss, summed over all ranks. It stays on the device, where
the optimizers read it (`Optimizers.step`), so a step does not wait for it. The host reads it one step later,
in the same order on all ranks.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.tools.logging import logger

from pc.errors import UserError
from pc.owner import local
from pc.schedules import Schedule
from pc.weights import clean_name

NAMES_SHOWN = 4


class Diverged(UserError):
    """The loss or the gradients were not finite in too many steps in a row."""


@dataclass
class _Verdict:
    """A step whose flag the host has not read yet."""

    step: int
    positions: range | None
    flag: Tensor
    """in host memory: 1 if the step was skipped; valid after `event`"""
    event: torch.Event | None


class FiniteSteps:
    """Decides for every step whether to skip it.

    Args:
        model_parts: this rank's sharded model parts.
        schedule: PC's.
        limit: stop the run after this many skipped steps in a row.
        report: called on the host for a skipped step, with the step and the number of skipped steps so far.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        schedule: Schedule | None,
        device: torch.device,
        limit: int,
        report: Callable[[int, int], None],
    ) -> None:
        self._model_parts, self._schedule, self._device = model_parts, schedule, device
        self._limit, self._report = limit, report
        self._waiting: deque[_Verdict] = deque()
        self._row: list[_Verdict] = []
        self.count = 0

    @torch.no_grad()
    def judge(self, loss: Tensor) -> Tensor:
        """1.0 on the device if the step must be skipped, else 0.0. All ranks call it and get the same result.

        Call it when the gradients are complete and before clipping.

        Args:
            loss: this rank's loss of the whole step, a scalar.
        """
        gradients = [local(p.grad) for model in self._model_parts for p in model.parameters() if p.grad is not None]
        norms = torch._foreach_norm([gradient for gradient in gradients if gradient.numel()])
        total = torch.stack([loss.float().reshape(()), *(norm.float().square() for norm in norms)]).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        self._flag = (~total.isfinite()).float()
        return self._flag

    def note(self, step: int, positions: range | None) -> None:
        """Store the flag of the current step, and read those of earlier steps.

        Args:
            positions: of its sequences in the data order, if known.

        Raises:
            Diverged: `limit` steps in a row were skipped.
        """
        if self._device.type == "cpu":
            self._waiting.append(_Verdict(step, positions, self._flag, None))
            self.settle()
            return
        flag = torch.empty((), pin_memory=True)
        flag.copy_(self._flag, non_blocking=True)
        event = torch.Event(self._device.type)
        event.record()
        self._waiting.append(_Verdict(step, positions, flag, event))
        self.settle(but=1)  # waiting for the newest could take as long as the step itself

    def settle(self, but: int = 0) -> bool:
        """Read all flags except the newest `but`; returns whether the last step read was skipped."""
        while len(self._waiting) > but:
            verdict = self._waiting.popleft()
            if verdict.event is not None:
                verdict.event.synchronize()
            if not verdict.flag.item():
                self._row.clear()
                continue
            self.count += 1
            self._row.append(verdict)
            logger.warning(
                f"Step {verdict.step} is skipped: its loss or gradient norm is not finite "
                f"({self.count} so far{_places([verdict])})"
            )
            self._report(verdict.step, self.count)
            if len(self._row) >= self._limit:
                raise Diverged(self._diagnosis())
        return bool(self._row)

    def _diagnosis(self) -> str:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, list(_not_finite(self._model_parts, self._schedule)))
        names = list(dict.fromkeys(name for of_rank in found for name in of_rank))
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return (
            f"the loss or the gradient norm was not finite in {len(self._row)} steps in a row, up to step "
            f"{self._row[-1].step}{_places(self._row)}; not finite now: "
            f"{', '.join(names[:NAMES_SHOWN]) or 'nothing'}{more}. None of these steps changed the weights or a "
            "checkpoint; lower optimizer.lr, or skip data with data.skip"
        )


def _places(verdicts: list[_Verdict]) -> str:
    positions = [verdict.positions for verdict in verdicts if verdict.positions is not None]
    return f"; data positions {positions[0].start}-{positions[-1].stop - 1}" if positions else ""


def _not_finite(model_parts: list[nn.Module], schedule: Schedule | None) -> Iterable[str]:
    """Names of this rank's non-finite tensors: raw weights first, then PC(W) and other parameters, then gradients."""
    parameters = [(clean_name(name), p) for model in model_parts for name, p in model.named_parameters()]
    raws = {} if schedule is None else {name: state.raw for name, state in schedule.weights.items()}
    for name, raw in raws.items():
        if _bad(raw):
            yield f"{name}.weight"
    for name, parameter in parameters:
        layer = name.removesuffix(".weight")
        if _bad(parameter) and not (layer in raws and _bad(raws[layer])):
            yield f"PC of {name} (largest weight {_largest(raws[layer]):.1e})" if layer in raws else name
    for name, parameter in parameters:
        if parameter.grad is not None and _bad(parameter.grad):
            yield f"gradient of {name}"


def _bad(tensor: Tensor) -> bool:
    return not bool(local(tensor).isfinite().all())


def _largest(tensor: Tensor) -> float:
    return float(local(tensor).abs().max()) if local(tensor).numel() else 0.0
