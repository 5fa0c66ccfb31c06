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
        """Steps skipped so far."""
        self._in_a_row = self._first_position = 0

    @torch.no_grad()
    def skips(self, step: int, is_finite: bool, positions: range) -> bool:
        """Whether to skip this step. All ranks call it, with complete gradients, before clipping.

        Args:
            is_finite: what all ranks agree on (`rank_sums.agree`).
            positions: of the step's sequences in the order of the data.

        Raises:
            Diverged: it is the last of `limit` such steps in a row.
        """
        if is_finite:
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
                f"{step}; data positions {self._first_position}-{positions.stop - 1}; not finite now: "
                f"{self._list_nonfinite_tensors()}. "
                "None of these steps changed the weights or a checkpoint; lower optimizer.lr, or skip data with data.skip"
            )
        return True

    def _list_nonfinite_tensors(self) -> str:
        """Some of the tensors of all ranks that are not finite."""
        names: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(names, list(self._find_own_nonfinite_tensors()))
        return ", ".join(list(dict.fromkeys(chain(*names)))[:NAMES_SHOWN]) or "nothing"

    def _find_own_nonfinite_tensors(self) -> Iterator[str]:
        """Names of this rank's: W first, then PC(W) of a finite W and other parameters, then gradients."""
        parameters = [(clean_name(name), p) for model in self._model_parts for name, p in model.named_parameters()]
        weights = {} if self._preconditioner is None else self._preconditioner.weights
        of_effective = {f"{name}.weight": weight.orig for name, weight in weights.items()}
        nonfinite_w = [name for name, orig in of_effective.items() if _has_nonfinite(orig)]
        yield from nonfinite_w
        for name, parameter in parameters:
            if name.removesuffix("_orig") not in nonfinite_w and _has_nonfinite(parameter):
                orig = of_effective.get(name)
                yield name if orig is None else f"PC of {name} (largest weight {local(orig).abs().max():.1e})"
        yield from (f"gradient of {name}" for name, p in parameters if p.grad is not None and _has_nonfinite(p.grad))


def _has_nonfinite(tensor: Tensor) -> bool:
    return not bool(local(tensor).isfinite().all())
