"""The object that `pc.precondition` makes: it follows optimizers, and is copied, saved and loaded with them. It changes
weights around their steps, not their updates, as Shampoo would.

The weights hold W or PC(W), and independently the gradients are those of W or of PC(W). A step of any followed optimizer
needs W in the weights; PC(W) is written into them again after all have stepped, or else before the next forward pass or
state dict. So an optimizer may be skipped or replaced.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pc.errors import UserError
from pc.followed import ids_of_parameters, joining_gammas, only_creates_state, unwrapped
from pc.shards import copy_into, on_any_rank
from pc.weight import Weight

LACKS_STATE = (
    "the optimizer goes on from a run with PC, the preconditioner does not; load the preconditioner's state too, as that of "
    "the optimizer was"
)
HOLDS_W = "it is a copy of a model that held W; call preconditioner.write_pc() before you copy, or use the model itself"


class Preconditioner(ABC):
    """Decides when PC(W) is computed. `pc.per_step` and `pc.per_forward` are its two modes.

    Attributes:
        weights: by name.
        holds_pc: whether forward passes may use the weights: they hold PC(W), or (mode "forward") W whose vectors
            are up to date.
        has_started: whether PC(W) was written or loaded at least once.
        is_pulled_back: whether gradients are those of W and gamma, since the last `pull_back`.
    """

    saved: tuple[str, ...] = ("gamma", "u", "v")
    """the tensors of a weight in the state"""

    def __init__(
        self, models: list[nn.Module], weights: dict[str, Weight], replicas: dist.ProcessGroup | None = None
    ) -> None:
        self.weights = weights
        self._replicas = replicas
        """ranks that have the same plain weights"""
        first = next(iter(weights.values()))
        first.guard("")  # removes the hooks that `attach` has put on the modules listed then
        parts = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
        # The first weight's hooks serve all weights: one on each model, and on each FSDP module, as it must run before
        # that gathers.
        first.guarded = [first.module, *dict.fromkeys((*models, *parts))]
        for weight in weights.values():
            self._add_tensors(weight)
            weight.parameters = weight.parameter, weight.gamma
            weight.preconditioner = self
        self._hooks: dict[Optimizer, list[RemovableHandle]] = {}
        """by followed optimizer"""
        self._stepped: set[Optimizer] = set()
        """followed optimizers that have stepped since PC(W) was written"""
        self._is_stepping = self.has_started = self.is_pulled_back = False
        self._is_new = True
        """whether no optimizer has stepped yet, and no state was loaded"""
        self._optimizer_goes_on = False
        """whether an optimizer's state with a gamma was loaded when this was new"""
        self._set_holds_pc(False)

    @abstractmethod
    def _add_tensors(self, weight: Weight) -> None:
        """Set gamma, raw, u and v of a weight."""

    @abstractmethod
    def write_pc(self, share: bool = False) -> None:
        """Compute PC(W) of the current weights, unless they hold it. Called when all optimizers have stepped.

        Args:
            share: all ranks call this now, so those with equal whole weights may divide the matrices among them.
        """

    @abstractmethod
    def pull_back(self) -> None:
        """Replace the gradient of PC(W) in `weight.grad` by that of W, and set `gamma.grad`.

        Call it once per step, after the last backward pass and before clipping.

        Raises:
            UserError: the weights hold W or were changed, there are no gradients, or they are already pulled back.
        """

    @abstractmethod
    def restore_raw(self) -> None:
        """Write W into the weights, unless they hold it, so that the optimizer steps and decays W.

        Raises:
            UserError: the weights were changed, or there are gradients of PC(W).
        """

    @abstractmethod
    def write_raw(self) -> None:
        """`restore_raw` without its checks; `pc.detach` calls it."""

    @abstractmethod
    def require_unchanged(self, alone: bool = False) -> None:
        """Raise a `UserError` if a weight was changed while it held PC(W), on all ranks, or on this one `alone`."""

    @abstractmethod
    def _use_loaded(self) -> None:
        """A state was loaded: hold its PC(W), computed with its `u` and `v` as they are."""

    def on_any_rank(self, found: Tensor, with_replicas: bool = True) -> Tensor:
        """Whether a condition is true on this rank, or on any that has weights in common with it; see `pc.shards`."""
        groups = [self._replicas] if self._replicas and with_replicas else []
        return on_any_rank(found, [w.parameter for w in self.weights.values()], *groups)

    def _prepare_step(self) -> bool:
        """Before an optimizer's step. False if it cannot change a weight with PC, because none has a gradient."""
        return True

    # --- optimizers

    def follow(self, *optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """From now on restore W before a step of these optimizers, and write PC(W) after all of them have stepped.

        They take the place of earlier ones of the same weights. Call it again when weights were unfrozen. A gamma that none
        of them has joins a parameter group of the optimizer of its weight (`pc.followed`), whose learning rate and weight
        decay it gets.

        Raises:
            UserError: none of them holds some weight, or can train gammas.
        """
        given = unwrapped(optimizers)
        for gamma, group in joining_gammas(self.weights.values(), given):  # all found before the first joins
            group["params"].append(gamma)
        trained = ids_of_parameters(*given)
        own = {id(p) for weight in self.weights.values() for p in (weight.parameter, weight.gamma)}
        for earlier in [*self._hooks]:
            if (own & ids_of_parameters(earlier)) <= trained:  # the new ones train all of ours that it does
                self._leave(earlier)
        self._register(optimizer for optimizer in given if own & ids_of_parameters(optimizer))
        self._observe()

    def _observe(self) -> None:
        """Note backward passes of the weights that are trained now."""

    def _register(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            self._hooks[optimizer] = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_load_state_dict_post_hook(self._after_load),
            ]

    def _leave(self, optimizer: Optimizer) -> None:
        for hook in self._hooks.pop(optimizer):
            hook.remove()

    def leave(self) -> None:
        """Take all hooks away; `pc.merge` and `pc.detach` call it."""
        for optimizer in [*self._hooks]:
            self._leave(optimizer)

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._is_new and self._optimizer_goes_on:
            raise UserError(LACKS_STATE)
        # Replicas have equal gradients, and one of them alone may ask for its optimizer's state.
        on_sharing_ranks = partial(self.on_any_rank, with_replicas=False)
        self._is_stepping = not only_creates_state(optimizer, on_sharing_ranks) and self._prepare_step()
        return None

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._is_stepping:
            return
        self._is_stepping = self._is_new = False
        self._stepped.add(optimizer)
        self._set_holds_pc(False)
        if self._stepped.issuperset(self._hooks):
            self.write_pc(share=True)

    def _after_load(self, optimizer: Optimizer) -> None:
        gammas = [weight.gamma for weight in self.weights.values() if weight.gamma is not None]
        self._optimizer_goes_on |= self._is_new and any(optimizer.state.get(gamma) for gamma in gammas)

    def _set_holds_pc(self, holds_pc: bool) -> None:
        self.holds_pc = holds_pc
        for weight in self.weights.values():
            weight.guard("" if holds_pc else HOLDS_W)
        if holds_pc:
            self.has_started = True
            self._stepped.clear()

    def has_gradients(self) -> bool:
        """Whether any weight has one."""
        return any(weight.parameter.grad is not None for weight in self.weights.values())

    # --- copies and states

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_hooks": {}, "_optimizers": list(self._hooks), "_replicas": None}

    def __setstate__(self, state: dict) -> None:
        """Of a copy: its optimizers have lost their hooks."""
        optimizers = state.pop("_optimizers")
        self.__dict__.update(state)
        for weight in self.weights.values():
            weight.preconditioner = self
        self._register(optimizers)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """W (mode "step"), gamma, u and v of every weight by name, and under "config" what defines its PC(W), as text.
        The model's state dict has the weights.

        Before PC(W) is first written it is only a target to load a state into, not a state to save.
        """
        if self.has_started and not self.holds_pc:
            self.write_pc()
        return self._contents()

    def _contents(self) -> dict[str, dict[str, Any]]:
        return {"config": {name: weight.split.describe() for name, weight in self.weights.items()}, **self._tensors()}

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {key: getattr(weight, key).detach() for key in self.saved if getattr(weight, key) is not None}
            for name, weight in self.weights.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, dict[str, Any]]) -> None:
        """Load a state, before or after the model's state dict of the same step. Whole tensors are sharded.

        Raises:
            UserError: weights or tensors are missing or unknown, or have another shape, or another PC(W).
        """
        there, here = _summary(state_dict), _summary(self._contents())
        for key in sorted(there.keys() | here.keys()):
            if there.get(key) != here.get(key):
                raise UserError(
                    f"PC's state has {key}: {there.get(key, 'nothing')}; the model has {here.get(key, 'nothing')}: "
                    "make it with the PCConfig of the run that saved the state"
                )
        for name, tensors in self._tensors().items():
            for key, tensor in tensors.items():
                copy_into(tensor, state_dict[name][key])
        self._is_new = False
        self._use_loaded()


def _summary(state: dict[str, dict[str, Any]]) -> dict[str, str]:
    """{"weight.tensor": its shape, "config.weight": what defines its PC(W)}"""
    flat = {f"{name}.{key}": value for name, values in state.items() for key, value in values.items()}
    return {key: f"shape {[*x.shape]}" if isinstance(x, Tensor) else str(x) for key, x in flat.items()}
