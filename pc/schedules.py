"""Schedules follow optimizers, and are copied, saved and loaded with them. Here is the simple one, "forward".

Two facts are kept apart: whether the weights hold PC(W) or W, and whether gradients are those of W. A step of any
followed optimizer makes the weights W; they become PC(W) again after all have stepped, or else before the next forward
pass or state dict. So an optimizer may be skipped or replaced.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pc.errors import UserError
from pc.shards import copy_into, local
from pc.weights import Weight

HOLDS_W = "it holds W; call schedule.materialise(), or use the model that has the schedule"
IS_PC = (
    "the weights that were loaded are PC(W) of a training run: load its schedule's state too, or call pc.preserve(model), "
    "or load dict(state) to use them as W"
)


class Schedule:
    """Decides when PC(W) is computed. This is schedule "forward": PC(W) is computed in every forward pass (`pc.PCLinear`),
    gradients are those of W and gamma already, and `u` and `v` change only when the weights do, once per optimizer step
    (paper, algorithm 3). Schedule "step" overrides the methods at the end.

    Attributes:
        weights: by name.
        holds_pc: whether forward passes may use the weights: they hold PC(W), or (schedule "forward") W whose vectors
            are up to date.
        has_started: whether they ever did.
        is_pulled_back: whether gradients are those of W and gamma, since the last `pull_back`.
    """

    saved: tuple[str, ...] = ("gamma", "u", "v")
    """the tensors of a weight in the state"""

    def __init__(self, models: list[nn.Module], weights: dict[str, Weight]) -> None:
        self.weights = weights
        first = next(iter(weights.values()))
        first.set_missing("")
        parts = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
        first.entries = [first.module, *dict.fromkeys((*models, *parts))]
        for weight in weights.values():
            self.start(weight)
            weight.held = weight.parameter, weight.gamma
            weight.schedule = self
        self._hooks: dict[Optimizer, list[RemovableHandle]] = {}
        """of the followed optimizers"""
        self._stepped: set[Optimizer] = set()
        """those that have stepped since the weights held PC(W)"""
        self._is_stepping = self.has_started = self.is_pulled_back = False
        self._set_holds_pc(False)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_hooks": {}, "_optimizers": list(self._hooks)}

    def __setstate__(self, state: dict) -> None:
        """Of a copy: its optimizers have lost their hooks."""
        optimizers = state.pop("_optimizers")
        self.__dict__.update(state)
        for weight in self.weights.values():
            weight.schedule = self
        self._register(optimizers)

    def follow(self, *optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """From now on restore W before a step of these optimizers, and materialise after all of them have stepped.

        They take the place of earlier ones of the same weights. A gamma that none of them has joins the parameters of one
        dimension (norms, biases), or without such its weight: learning rate and weight decay are theirs.

        Raises:
            UserError: none of them holds some weight, or can train gammas.
        """
        given = unwrapped(optimizers)
        require_trained(self.weights.values(), given)
        of_vectors = _groups_for_gammas(given)
        held = {id(p) for optimizer in given for group in optimizer.param_groups for p in group["params"]}
        for weight in self.weights.values():
            if weight.gamma is not None and weight.parameter.requires_grad and id(weight.gamma) not in held:
                _group_for(weight, of_vectors)["params"].append(weight.gamma)
        own = {id(p) for weight in self.weights.values() for p in (weight.parameter, weight.gamma)}
        for earlier in [*self._hooks]:
            if own & {id(p) for group in earlier.param_groups for p in group["params"]} <= held:
                self._leave(earlier)
        self._register(o for o in given if own & {id(p) for group in o.param_groups for p in group["params"]})

    def _register(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            before, after = self._before_step, self._after_step
            self._hooks[optimizer] = [
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
            ]

    def _leave(self, optimizer: Optimizer) -> None:
        for hook in self._hooks.pop(optimizer):
            hook.remove()

    def leave(self) -> None:
        """Take all hooks away; `pc.merge` and `pc.detach` call it."""
        for optimizer in [*self._hooks]:
            self._leave(optimizer)

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._is_stepping = not _only_creates_state(optimizer) and self._begin()
        return None

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._is_stepping:
            return
        self._is_stepping = False
        self._stepped.add(optimizer)
        self._set_holds_pc(False)
        if self._stepped.issuperset(self._hooks):
            self.materialise(share=True)

    def _set_holds_pc(self, holds_pc: bool) -> None:
        self.holds_pc = holds_pc
        for weight in self.weights.values():
            weight.set_missing("" if holds_pc else HOLDS_W)
        if holds_pc:
            self.has_started = True
            self._stepped.clear()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """W (schedule "step"), gamma, u and v of every weight by name, and under "config" what defines its PC(W), as text.
        The model's state dict has the weights.

        Before the first `materialise` it is only a target to load a state into, not a state to save.
        """
        if self.has_started and not self.holds_pc:
            self.materialise()
        return self._contents()

    def _contents(self) -> dict[str, dict[str, Any]]:
        return {"config": {name: str(weight.form) for name, weight in self.weights.items()}, **self._tensors()}

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
        contents, given = (
            {
                f"{name}.{key}": f"shape {[*value.shape]}" if isinstance(value, Tensor) else value
                for name, values in state.items()
                for key, value in values.items()
            }
            for state in (self._contents(), state_dict)
        )
        for key in sorted(contents.keys() | given.keys()):
            if contents.get(key) != given.get(key):
                raise UserError(f"the PC state has {key} of {given.get(key)}, the model of {contents.get(key)}")
        for name, tensors in self._tensors().items():
            for key, tensor in tensors.items():
                copy_into(tensor, state_dict[name][key])
        self._use_loaded()

    def require_unchanged(self, alone: bool = False) -> None:
        """Raise a `UserError` if a weight was changed while it held PC(W), on all ranks, or on this one `alone`."""

    def has_gradients(self) -> bool:
        """Whether any weight has one."""
        return any(weight.parameter.grad is not None for weight in self.weights.values())

    # What schedule "step" does differently:

    def start(self, weight: Weight) -> None:
        """Set the tensors of a weight."""
        layer = weight.module
        layer.start_pc()
        weight.raw, weight.u, weight.v = layer.weight, layer.u, layer.v

    def materialise(self, share: bool = False) -> None:
        """Compute PC(W) of the current weights. The schedule calls it when all optimizers have stepped.

        Args:
            share: whether all ranks call this, and each may compute a part of weights that all of them have whole.
        """
        for weight in self.weights.values():
            weight.module.refresh()
            weight.u, weight.v = weight.module.u, weight.module.v
        self._set_holds_pc(True)

    def pull_back(self) -> None:
        """Make gradients of PC(W) those of W and gamma, once per step, after the last backward pass, before clipping."""

    def restore_raw(self) -> None:
        """Write W into the weights, so that the optimizer steps and decays W."""
        self.write_raw()

    def write_raw(self) -> None:
        """The same whatever the gradients are."""
        self._set_holds_pc(False)

    def _use_loaded(self) -> None:
        """After a state was loaded: `u` and `v` are those that PC(W) was computed with."""
        self._set_holds_pc(True)

    def _begin(self) -> bool:
        """Before an optimizer's step; whether the step changes weights."""
        return True


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
            raise UserError(f"pc.schedule takes optimizers, not a {type(optimizer).__name__}")
    return found


def require_trained(weights: Iterable[Weight], optimizers: list[Optimizer]) -> None:
    """Raise a `UserError` for a weight that no optimizer holds, or a gamma that none can train."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    groups = _groups_for_gammas(optimizers)
    for weight in weights:
        if not weight.parameter.requires_grad:
            continue
        if id(weight.parameter) not in held:
            raise UserError(
                f"no optimizer given to pc.schedule holds {weight.name}.weight; create optimizers after any sharding, and "
                "give all that train the model"
            )
        if weight.config.learnable_gamma and id(weight.gamma) not in held and _group_for(weight, groups) is None:
            raise UserError(
                f"no optimizer given to pc.schedule can train the gamma of {weight.name}, because Muon trains matrices "
                "alone; give one for vectors too, or set learnable_gamma=False"
            )


def _groups_for_gammas(optimizers: list[Optimizer]) -> list[dict[str, Any]]:
    """Parameter groups, those first that have vectors."""
    groups = [
        g for optimizer in optimizers if not isinstance(optimizer, torch.optim.Muon) for g in optimizer.param_groups
    ]
    return sorted(groups, key=lambda group: not any(p.ndim == 1 for p in group["params"]))


def _group_for(weight: Weight, groups: list[dict[str, Any]]) -> Any:
    """Of `_groups_for_gammas`; None if there is none."""
    if groups and any(p.ndim == 1 for p in groups[0]["params"]):
        return groups[0]
    return next((group for group in groups if any(p is weight.parameter for p in group["params"])), None)


def require_real(weight: Weight) -> None:
    """Raise a `UserError` for a weight on the meta device or in low precision."""
    if weight.parameter.is_meta:
        raise UserError(f"{weight.name} is on the meta device; call pc.schedule once the weights exist")
    if weight.parameter.dtype.itemsize < 4:
        raise UserError(
            f"{weight.name} is {weight.parameter.dtype}, but W needs float32 to accumulate small updates; call "
            "model.float(), and use autocast or FSDP's mixed precision for fast matmuls"
        )


def _only_creates_state(optimizer: Optimizer) -> bool:
    """Whether this is the step with zero gradients and lr 0 that torch.distributed.checkpoint runs to create
    optimizer state. It does not train."""
    if optimizer.state or any(float(group.get("lr", 0.0)) for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not any(local(gradient).any() for gradient in gradients)
