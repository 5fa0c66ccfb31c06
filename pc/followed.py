"""What optimizers hold: W in place of PC(W), and gamma."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pc.errors import UserError
from pc.guard import MAKE_IT_LATER
from pc.shards import innermost
from pc.watch import Parameters
from pc.weight import Weight

CALLERS = ("accelerate.", "lightning.", "pytorch_lightning.")
"""Packages whose wrappers of optimizers only call them."""
EXCHANGES = ("eval", "train")
"""Methods of schedule-free optimizers, which exchange W for its average and back."""


def unwrapped(optimizers: Iterable[Any]) -> list[Optimizer]:
    """The optimizers themselves, taken out of lists and of the wrappers of accelerate and Lightning.

    Raises:
        UserError: one is no optimizer, or wraps another and may move W after its step.
    """
    found: list[Optimizer] = []
    for optimizer in optimizers:
        while type(optimizer).__module__.startswith(CALLERS) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if isinstance(optimizer, Optimizer):
            # a wrapper has not called the constructor, which makes these hooks, or has made them by hand
            if isinstance(getattr(optimizer, "optimizer", None), Optimizer) or not hasattr(
                optimizer, "_optimizer_step_post_hooks"
            ):
                name = type(optimizer).__name__
                raise UserError(f"{name} wraps another optimizer and may move W after its step: {MAKE_IT_LATER}")
            found.append(optimizer)
        elif isinstance(optimizer, Iterable) and not isinstance(optimizer, (torch.Tensor, str)):
            found += unwrapped(optimizer)
        else:
            raise UserError(f"pc.precondition takes optimizers, not a {type(optimizer).__name__}")
    return found


def ids_of_parameters(*optimizers: Optimizer) -> set[int]:
    # [:] makes a plain list; iterating over `Parameters` may raise an error
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"][:]}


def join(weights: Iterable[Weight], given: Iterable[Any], preconditioner: Any) -> list[Optimizer]:
    """Put W in the place of PC(W) in the optimizers, and gamma into a group of the same optimizer.

    W also gets what an optimizer has stored for PC(W), such as its momentum. `zero_grad` clears their gradients of PC(W) too.

    Raises:
        UserError: as `find_groups`. Optimizers are then as before.
    """
    weights = [*weights]
    optimizers, joining = find_groups(weights, given, preconditioner)  # all checked before the first is changed
    given_names = {id(p): name for one in optimizers for group in one.param_groups for p, name in _named(group)}
    # perhaps with a prefix, as of a compiled model
    names = {
        w.name: given_names.get(id(w.effective))
        or given_names.get(id(w.orig), "").removesuffix("_orig")
        or w.parameter_name
        for w in weights
    }
    for optimizer in optimizers:
        has = ids_of_parameters(optimizer)
        for group in optimizer.param_groups:
            wanted: list[tuple[Any, str]] = []
            for p, name in _named(group):
                weight = next((w for w in weights if w.effective is p), None)
                if weight is None:
                    wanted.append((p, name))
                    continue
                if id(weight.orig) in has:  # the optimizer was made of all parameters, after `pc.precondition`
                    continue
                wanted.append((weight.orig, f"{name}_orig"))
                if p in optimizer.state:
                    optimizer.state[weight.orig] = optimizer.state.pop(p)
            wanted += [(w.gamma, f"{names[w.name]}_gamma") for w, chosen in joining if chosen is group]
            _introduce(optimizer, group, [(p, name) for p, name in wanted if id(p) not in has])
            _set_parameters(group, wanted, Parameters([p for p, _ in wanted], preconditioner))
        if not hasattr(optimizer.zero_grad, "without_pc"):
            optimizer.zero_grad = _clearing(optimizer.zero_grad, optimizer, preconditioner)  # type: ignore[method-assign]
            _write_after_exchanges(optimizer, preconditioner)
    return optimizers


def leave(weights: Iterable[Weight], optimizer: Optimizer) -> None:
    """Undo `join`."""
    for name in ("zero_grad", *EXCHANGES):
        if own := getattr(getattr(optimizer, name, None), "without_pc", None):
            setattr(optimizer, name, own)
    gammas = {id(w.gamma) for w in weights}
    for group in optimizer.param_groups:
        given = []
        for p, name in _named(group):
            if id(p) in gammas:
                optimizer.state.pop(p, None)
                continue
            weight = next((w for w in weights if w.orig is p), None)
            if weight is not None and p in optimizer.state:
                optimizer.state[weight.effective] = optimizer.state.pop(p)
            given.append((p, name) if weight is None else (weight.effective, name.removesuffix("_orig")))
        _set_parameters(group, given, [p for p, _ in given])


def _named(group: dict[str, Any]) -> list[tuple[nn.Parameter, str]]:
    """Its parameters with the names that it has for them, if it was made from `named_parameters()`."""
    parameters = group["params"][:]
    return [*zip(parameters, group.get("param_names") or [""] * len(parameters), strict=True)]


def _introduce(optimizer: Optimizer, group: dict[str, Any], named: list[tuple[nn.Parameter, str]]) -> None:
    """Pass parameters that join a group to the optimizer's own `add_param_group`, which may check or prepare them.

    The group that this adds is removed again, because it would break existing schedulers.
    """
    if named and type(optimizer).add_param_group is not Optimizer.add_param_group:
        given = [(name, p) if "param_names" in group else p for p, name in named]
        optimizer.add_param_group(
            {key: value for key, value in group.items() if key != "param_names"} | {"params": given}
        )
        optimizer.param_groups.pop()


def _set_parameters(group: dict[str, Any], named: list[tuple[nn.Parameter, str]], as_list: list[nn.Parameter]) -> None:
    """Set a group's parameters, as the list `as_list`; the old list gets them too, because LBFGS keeps it."""
    group["params"][:] = [parameter for parameter, _ in named]
    group["params"] = as_list
    if "param_names" in group:
        group["param_names"] = [name for _, name in named]


def _clearing(zero_grad: Callable, optimizer: Optimizer, preconditioner: Any) -> Callable:
    @wraps(zero_grad)
    def both(*args, **kwargs) -> None:
        preconditioner.clear_gradients(optimizer)
        with preconditioner.exempt():  # others may have gradients of PC(W)
            zero_grad(*args, **kwargs)

    both.without_pc = zero_grad  # type: ignore[attr-defined]
    return both


def _write_after_exchanges(optimizer: Any, preconditioner: Any) -> None:
    """Write PC(W) after `eval` and `train` if they have exchanged W."""
    last: list[tuple] = []  # the last call
    running: list[Callable] = []

    def wrapped(exchange: Callable) -> Callable:
        @wraps(exchange)
        def with_pc(*args, **kwargs) -> Any:
            if running:  # one of the two may call the other
                return exchange(*args, **kwargs)
            call = exchange.__name__, args, kwargs
            is_repeated, last[:] = last == [call], [call]  # trainers call `train` in every step
            running.append(exchange)
            try:
                with preconditioner.exchange(looks=not is_repeated):
                    return exchange(*args, **kwargs)
            finally:
                running.clear()

        with_pc.without_pc = exchange  # type: ignore[attr-defined]
        return with_pc

    for name in EXCHANGES:
        if callable(exchange := getattr(optimizer, name, None)):
            setattr(optimizer, name, wrapped(exchange))


def find_groups(
    weights: Iterable[Weight], given: Iterable[Any], preconditioner: Any = None
) -> tuple[list[Optimizer], list[tuple[Weight, Any]]]:
    """The optimizers, `unwrapped`. Then each weight whose gamma none of them has, with the parameter group that its gamma
    is to join.

    This changes nothing, and works before `pc.precondition` has made W and gamma.

    Raises:
        UserError: a trained weight is in no optimizer; `weight` and W are in two groups; no optimizer can train a gamma; or
            one has another preconditioner.
    """
    optimizers = unwrapped(given)
    for optimizer in optimizers:
        others = {getattr(group["params"], "preconditioner", preconditioner) for group in optimizer.param_groups}
        if others - {preconditioner}:
            raise UserError(f"a {type(optimizer).__name__} has a preconditioner already; use that one")
        if _keeps_views(optimizer, weights):
            name = type(optimizer).__name__
            raise UserError(
                f"{name} has made its own views of the weights, which are PC(W) now, not W: {MAKE_IT_LATER}"
            )
    # an optimizer may be given twice, or share its groups with a wrapper
    by_id = {id(group): group for optimizer in optimizers for group in optimizer.param_groups}
    groups = [{*map(id, group["params"][:])} for group in by_id.values()]
    joining = []
    for weight in weights:
        has_gamma = not weight.config.learnable_gamma or any(id(weight.gamma) in group for group in groups)
        if _is_held(weight, groups) and not has_gamma and (group := _group_for_gamma(weight, optimizers)):
            joining.append((weight, group))
    return optimizers, joining


def _is_held(weight: Weight, groups: list[set[int]]) -> bool:
    """Whether PC(W) or W is in a parameter group.

    Raises:
        UserError: they are in two, or a trained weight is in none.
    """
    # whether a group has PC(W), and whether it has W
    holding = {(id(weight.effective) in group, id(weight.orig) in group) for group in groups}
    if {(True, False), (False, True)} <= holding and (True, True) not in holding:
        raise UserError(
            f"{weight.name}: {weight.attribute} and {weight.attribute}_orig are in different parameter groups; W, "
            f"which is {weight.attribute}_orig, replaces {weight.attribute}: put both into the group that should train W"
        )
    is_held = any(map(any, holding))
    if weight.effective.requires_grad and not is_held:
        raise UserError(
            f"no optimizer given to pc.precondition holds the weight of {weight.name}; create optimizers after any "
            "sharding, and give all that train the model"
        )
    return is_held


def _keeps_views(optimizer: Optimizer, weights: Iterable[Weight]) -> bool:
    """Whether anything but its groups holds a view of a weight, as blocks of it in Meta's DistributedShampoo."""
    held = {id(weight.effective) for weight in weights}
    # a buffer that has become the storage of W too, as ZeroRedundancyOptimizer's, is no view of PC(W) alone
    storages = (
        {_storage(w.effective) for w in weights} - {_storage(w.orig) for w in weights if w.orig is not None} - {0}
    )
    seen: set[int] = set()
    todo = [value for key, value in vars(optimizer).items() if key not in ("param_groups", "state")]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (nn.Module, Optimizer, type)) or callable(one):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if id(one) not in held and _storage(one) in storages:
                return True
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, (list, tuple, set)):
            todo += one
        else:
            todo += getattr(one, "__dict__", {}).values()
    return False


def _storage(tensor: torch.Tensor) -> int:
    return innermost(tensor).untyped_storage().data_ptr()


def _group_for_gamma(weight: Weight, optimizers: list[Optimizer]) -> Any:
    """The parameter group that a new gamma joins, `_fitting_group`; None for a frozen weight without one.

    Raises:
        UserError: there is none, or it is of an optimizer that would not train a new gamma.
    """
    group = _fitting_group(weight, optimizers)
    if group is None and weight.effective.requires_grad:
        raise UserError(
            f"no optimizer given to pc.precondition can train the gamma of {weight.name}, because Muon, AdamH and MuonH "
            "train matrices alone; give one for vectors too, or set learnable_gamma=False"
        )
    for optimizer in optimizers:  # a ZeroRedundancyOptimizer divided its parameters among ranks when it was made
        is_chosen = any(group is other for other in optimizer.param_groups)
        if is_chosen and type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UserError(
                "a ZeroRedundancyOptimizer would not train parameters added later: call preconditioner = "
                "pc.precondition(model) first, then create it from model.parameters(), then preconditioner.follow(optimizer)"
            )
    return group


def _fitting_group(weight: Weight, optimizers: list[Optimizer]) -> Any:
    """The parameter group that fits a gamma.

    In the optimizer that holds its weight: the weight's own group if it has vectors; else the first with vectors and the
    same learning rate; else the first with vectors, because a group without any may be for matrices alone, as those of dion
    and GaLore. Only vectors sharded as the weight is count: a group must not mix shardings.

    If that optimizer has no vectors, it may be for matrices alone: then the first group with vectors in another optimizer.
    If there is none either: the weight's own, or None if it is of Muon, AdamH or MuonH.
    """
    mesh = getattr(weight.effective, "device_mesh", None)

    def has_vectors(group: dict) -> bool:
        return any(p.ndim == 1 and getattr(p, "device_mesh", None) == mesh for p in group["params"][:])

    def has_weight(group: dict) -> bool:
        return any(p is weight.effective or p is weight.orig for p in group["params"][:])

    holder, own_group = next((one, group) for one in optimizers for group in one.param_groups if has_weight(group))
    groups = [group for group in holder.param_groups if has_vectors(group)]
    if not groups:
        of_others = (group for other in optimizers for group in other.param_groups if has_vectors(group))
        return next(of_others, None if _takes_matrices_alone(holder) else own_group)
    if has_vectors(own_group):
        return own_group
    return next((group for group in groups if _rate(group) == _rate(own_group)), groups[0])


def _takes_matrices_alone(optimizer: Optimizer) -> bool:
    """What a class says of itself; torch's Muon says nothing."""
    return isinstance(optimizer, torch.optim.Muon) or getattr(optimizer, "takes_matrices_alone", False)


def _rate(group: dict) -> Any:
    """The learning rate without a schedule's factor, which may be 0 now."""
    return group.get("initial_lr", group.get("lr"))
