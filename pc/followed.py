"""What a preconditioner needs to know of the optimizers that it follows: which of them train what."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from pc.errors import UserError
from pc.hyperball import Hyperball
from pc.shards import local
from pc.weight import Weight


def unwrapped(optimizers: Iterable[Any]) -> list[Optimizer]:
    """Optimizers alone, of lists and of accelerate's wrappers."""
    found: list[Optimizer] = []
    for optimizer in optimizers:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        if isinstance(optimizer, Optimizer):
            found.append(optimizer)
        elif isinstance(optimizer, Iterable):
            found += unwrapped(optimizer)
        else:
            raise UserError(f"pc.precondition takes optimizers, not a {type(optimizer).__name__}")
    return found


def ids_of_parameters(*optimizers: Optimizer) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def joining_gammas(weights: Iterable[Weight], optimizers: list[Optimizer]) -> list[tuple[Any, Any]]:
    """The gammas that no optimizer has, each with the parameter group that it shall join.

    Raises:
        UserError: no optimizer holds some weight, or can train a gamma.
    """
    held = ids_of_parameters(*optimizers)
    joining = []
    for weight in weights:
        if not weight.parameter.requires_grad:
            continue
        if id(weight.parameter) not in held:
            raise UserError(
                f"no optimizer given to pc.precondition holds the weight of {weight.name}; create optimizers after any "
                "sharding, and give all that train the model"
            )
        if not weight.config.learnable_gamma or id(weight.gamma) in held:
            continue
        group = _group_for_gamma(weight, optimizers)
        if group is None:
            raise UserError(
                f"no optimizer given to pc.precondition can train the gamma of {weight.name}, because Muon, AdamH and MuonH "
                "train matrices alone; give one for vectors too, or set learnable_gamma=False"
            )
        joining.append((weight.gamma, group))
    return joining


def _group_for_gamma(weight: Weight, optimizers: list[Optimizer]) -> Any:
    """The parameter group that a new gamma joins: the first that has vectors, or else the group of its weight; None if
    there is none. Muon, AdamH and MuonH train matrices alone."""
    of_matrices = (torch.optim.Muon, Hyperball)
    groups = [g for optimizer in optimizers if not isinstance(optimizer, of_matrices) for g in optimizer.param_groups]
    of_vectors = [group for group in groups if any(p.ndim == 1 for p in group["params"])]
    of_weight = [group for group in groups if any(p is weight.parameter for p in group["params"])]
    return next(iter(of_vectors + of_weight), None)


def only_creates_state(optimizer: Optimizer) -> bool:
    """Whether this is the step with zero gradients and lr 0 that torch.distributed.checkpoint runs to create
    optimizer state. It does not train."""
    if optimizer.state or any(float(group.get("lr", 0.0)) for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not any(local(gradient).any() for gradient in gradients)
