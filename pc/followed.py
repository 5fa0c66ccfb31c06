"""What a preconditioner needs to know of the optimizers that it follows: which of them train what."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
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
    """The gammas that no optimizer has, each with the parameter group that it shall join. Those of frozen weights are
    among them: without a gradient they stay as they are.

    Raises:
        UserError: no optimizer holds some weight that is trained, or can train its gamma.
    """
    held = ids_of_parameters(*optimizers)
    joining = []
    for weight in weights:
        is_trained, is_held = weight.parameter.requires_grad, id(weight.parameter) in held
        if is_trained and not is_held:
            raise UserError(
                f"no optimizer given to pc.precondition holds the weight of {weight.name}; create optimizers after any "
                "sharding, and give all that train the model"
            )
        if not is_held or not weight.config.learnable_gamma or id(weight.gamma) in held:
            continue
        group = _group_for_gamma(weight, optimizers)
        if group is None and is_trained:
            raise UserError(
                f"no optimizer given to pc.precondition can train the gamma of {weight.name}, because Muon, AdamH and MuonH "
                "train matrices alone; give one for vectors too, or set learnable_gamma=False"
            )
        if group is None:
            continue
        holder = next(one for one in optimizers if any(group is other for other in one.param_groups))
        if type(holder).__name__ == "ZeroRedundancyOptimizer":  # divided its parameters when it was made
            raise UserError(
                "a ZeroRedundancyOptimizer would not train gammas that join it: call preconditioner = pc.precondition(model) "
                "first, then make it of model.parameters(), then preconditioner.follow(optimizer)"
            )
        joining.append((weight.gamma, group))
    return joining


def _group_for_gamma(weight: Weight, optimizers: list[Optimizer]) -> Any:
    """The parameter group that a new gamma joins, of the optimizer that holds its weight: the weight's own if it has
    vectors, or one with vectors and the same learning rate, or else the weight's own. The vectors are sharded as the weight
    is, as one group may not mix them.

    Muon, AdamH and MuonH train matrices alone: of their weights the gammas join the first group with vectors of another
    optimizer; None if there is none.
    """
    of_matrices = (torch.optim.Muon, Hyperball)
    mesh = getattr(weight.parameter, "device_mesh", None)

    def has_vectors(group: dict) -> bool:
        return any(p.ndim == 1 and getattr(p, "device_mesh", None) == mesh for p in group["params"])

    holder = next(optimizer for optimizer in optimizers if id(weight.parameter) in ids_of_parameters(optimizer))
    if isinstance(holder, of_matrices):
        others = [optimizer for optimizer in optimizers if not isinstance(optimizer, of_matrices)]
        return next((group for other in others for group in other.param_groups if has_vectors(group)), None)
    own = next(group for group in holder.param_groups if any(p is weight.parameter for p in group["params"]))
    groups = [group for group in holder.param_groups if has_vectors(group)]
    if not own.get("use_muon"):  # some optimizers have Muon for such groups, and AdamW for the others
        groups = [group for group in groups if _rate(group) == _rate(own)]
    return own if has_vectors(own) or not groups else groups[0]


def _rate(group: dict) -> Any:
    """The learning rate without a schedule's factor, which may be 0 now."""
    return group.get("initial_lr", group.get("lr"))


def only_creates_state(optimizer: Optimizer, on_any_rank: Callable[[Tensor], Tensor]) -> bool:
    """Whether this is the step with zero gradients and lr 0 that torch.distributed.checkpoint runs to create
    optimizer state. It does not train.

    Args:
        on_any_rank: whether a condition is true there; a rank whose shards have no gradient decides as the others do.
    """
    if optimizer.state or not all(group.get("lr") == 0 for group in optimizer.param_groups):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    found = torch.stack([gradient.any() for gradient in gradients]).any() if gradients else torch.tensor(False)
    return not on_any_rank(found.to(local(parameters[0]).device))
