"""What PC does before and after every step of every optimizer, whoever calls it.

Torch has global hooks around the steps of all optimizers, of copied and wrapped ones too. They find what is
concerned by the parameters that an optimizer holds, so a training loop has nothing to register and nothing to forget.
"""

from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Observer(Protocol):
    """A PC layer, or what holds the raw weights of several."""

    def before_step(self, optimizer: Optimizer, parameters: set[int]) -> None:
        """`parameters` are the `id`s of those that the optimizer holds."""

    def after_step(self, optimizer: Optimizer, parameters: set[int], began: int) -> None:
        """`began` is what `now` was before the step."""


# Schedules put W in place before their layers look whether it is there. Dictionaries keep the order, which ranks share.
_schedules: "WeakKeyDictionary[Observer, None]" = WeakKeyDictionary()
_layers: "WeakKeyDictionary[Observer, None]" = WeakKeyDictionary()
_began: "WeakKeyDictionary[Optimizer, int]" = WeakKeyDictionary()
_steps = count(1)
_last_step = 0
_registered = False


def observe_as_schedule(observer: Observer) -> None:
    """From now on tell a schedule of every optimizer step, before the layers."""
    _schedules[observer] = None
    _register()


def observe_as_layer(observer: Observer) -> None:
    """From now on tell a layer of every optimizer step."""
    _layers[observer] = None
    _register()


def go_before_later_hooks(optimizer: Optimizer) -> None:
    """From now on tell observers of a step's end before hooks that are registered on the optimizer later.

    Torch runs global hooks after an optimizer's own. A hook that reads weights after a step, such as one that computes
    float8 scales or a moving average, must find PC(W) there.
    """
    optimizer.register_step_post_hook(_after)


def now() -> int:
    """Number of the optimizer step that began last."""
    return _last_step


def _register() -> None:
    global _registered
    if not _registered:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        _registered = True


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _last_step
    _began.pop(optimizer, None)
    if _only_creates_state(optimizer):
        return
    parameters = _parameters(optimizer)
    for observer in [*_schedules, *_layers]:
        observer.before_step(optimizer, parameters)
    _last_step = _began[optimizer] = next(_steps)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    began = _began.pop(optimizer, None)  # None where it was told already
    if began is not None:
        parameters = _parameters(optimizer)
        for observer in [*_schedules, *_layers]:
            observer.after_step(optimizer, parameters, began)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _only_creates_state(optimizer: Optimizer) -> bool:
    """Whether this is the step with zero gradients and lr 0 by which torch.distributed.checkpoint makes an
    optimizer create its state. No training step: PC must neither refuse it nor move anything."""
    if optimizer.state or any(float(group.get("lr", 0.0)) for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not any(getattr(g, "_local_tensor", g).any() for g in gradients)  # this rank's part of a DTensor
