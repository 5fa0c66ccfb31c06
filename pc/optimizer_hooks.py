"""Calls PC layers and schedules before and after every step of every optimizer.

Torch's global hooks run around the steps of all optimizers, also of copied and wrapped ones. Layers and schedules
compare the optimizer's parameters with their own, so a training loop does not have to register anything.
"""

from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Observer(Protocol):
    """A PC layer or a `pc.StepSchedule`."""

    def before_step(self, optimizer: Optimizer, parameters: set[int], has_closure: bool) -> None:
        """`parameters` are the `id`s of the optimizer's parameters; `has_closure`: this is `step(closure)`."""

    def after_step(self, optimizer: Optimizer, parameters: set[int], began: int) -> None:
        """`began` is the number of this step, comparable with `now()`."""


# Two registries: schedules must restore W before the layers check for it. The order must be the same on all ranks, so
# these are dictionaries, not sets.
_schedules: "WeakKeyDictionary[Observer, None]" = WeakKeyDictionary()
_layers: "WeakKeyDictionary[Observer, None]" = WeakKeyDictionary()
_began: "WeakKeyDictionary[Optimizer, int]" = WeakKeyDictionary()
_last_step = 0


def observe_as_schedule(observer: Observer) -> None:
    """Call a schedule around every optimizer step from now on, before the layers."""
    _schedules[observer] = None
    _register()


def observe_as_layer(observer: Observer) -> None:
    """Call a layer around every optimizer step from now on."""
    _layers[observer] = None
    _register()


def go_before_later_hooks(optimizer: Optimizer) -> None:
    """Call observers after a step before any hook that is registered on this optimizer later.

    Torch runs global hooks after an optimizer's own hooks. A hook that reads weights after a step, such as one that
    computes float8 scales or a moving average, must see PC(W).
    """
    optimizer.register_step_post_hook(_after)


def now() -> int:
    """Number of the optimizer step that began most recently."""
    return _last_step


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _last_step
    _began.pop(optimizer, None)
    if _only_creates_state(optimizer):
        return
    parameters = _parameters(optimizer)
    has_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None  # args[0] is the optimizer
    for observer in [*_schedules, *_layers]:
        observer.before_step(optimizer, parameters, has_closure)
    _last_step += 1
    _began[optimizer] = _last_step


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    began = _began.pop(optimizer, None)  # None if this hook already ran for the step
    if began is not None:
        parameters = _parameters(optimizer)
        for observer in [*_schedules, *_layers]:
            observer.after_step(optimizer, parameters, began)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _only_creates_state(optimizer: Optimizer) -> bool:
    """Whether this is the step with zero gradients and lr 0 that torch.distributed.checkpoint runs to create
    optimizer state. It does not train, so PC must neither raise an error nor update anything."""
    if optimizer.state or any(float(group.get("lr", 0.0)) for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not any(getattr(g, "_local_tensor", g).any() for g in gradients)  # a DTensor's local shard
