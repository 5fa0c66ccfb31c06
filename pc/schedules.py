"""Schedules follow optimizers, and are copied, saved and loaded with them. Here is the simple one, "forward".

A training loop is the same for both: `pull_back()` after the last backward pass of a step, before clipping; then the
schedule's hooks call `restore_raw()` before the optimizers' step and `materialise()` after it, as a loop without
`torch.optim` optimizers does itself (docs/library.md).
"""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pc.errors import UserError
from pc.shards import local
from pc.weights import Weight

# Phases: what the weights and their gradients are.
RAW = "raw"
"""The weights are W, or (schedule "forward") their vectors are not up to date: no forward pass."""
PC = "PC(W)"
"""Forward and backward passes see PC(W)."""
PULLED = "pulled back"
"""As PC, with gradients of W and gamma."""

NOT_READY = "it holds W; step every optimizer given to its schedule, or call schedule.materialise()"
TWICE = (
    "pull_back() on gradients that are already those of W; call it once per step, after the last micro-batch, and "
    'optimizer.zero_grad() before the next backward(); a loss that contains a gamma itself needs schedule="forward"'
)
NOT_RESTORED = "materialise() while the weights hold PC(W); call restore_raw() and optimizer.step() first"

# Calls that are wrong in a phase.
REFUSED = {
    ("pull_back", RAW): "pull_back() while the weights hold W; call materialise() and backward() first",
    ("pull_back", PULLED): TWICE,
    ("restore_raw", RAW): "restore_raw() while the weights already hold W",
    ("restore_raw", PC): "a step on gradients of PC(W), without schedule.pull_back() since the last backward(); it "
    "makes them those of W: call it once per step, before clipping",
    ("materialise", PC): NOT_RESTORED,
    ("materialise", PULLED): NOT_RESTORED,
    ("state_dict", RAW): "state_dict() while the weights hold W; call materialise() first",
}  # fmt: skip


class Schedule:
    """Decides when PC(W) is computed. This is schedule "forward": PC(W) is computed in every forward pass (`pc.PCLinear`),
    gradients are those of W and gamma already, and `u` and `v` change only when the weights do, once per optimizer step
    (paper, algorithm 3). Schedule "step" overrides the methods at the end.

    Attributes:
        phase: RAW, PC or PULLED.
        weights: by name.
    """

    saved: tuple[str, ...] = ("gamma", "u", "v")
    """the tensors of a weight in the state"""

    def __init__(self, models: list[nn.Module], weights: dict[str, Weight]) -> None:
        self.weights = weights
        for weight in weights.values():
            require_real(weight)
            self.start(weight)
            weight.held = weight.parameter, weight.gamma
        self._optimizers: list[Optimizer] = []
        """that hold a weight or gamma"""
        self._stepped: set[Optimizer] = set()
        """those that have stepped since the weights held PC(W)"""
        self._is_stepping = False
        self._has_started = False
        self._set_phase(RAW)

    def __setstate__(self, state: dict) -> None:
        """Of a copy: its optimizers have lost their hooks."""
        self.__dict__.update(state)
        self._register(self._optimizers)

    def follow(self, *optimizers: Optimizer) -> None:
        """From now on restore W before a step of these optimizers, and materialise after all of them have stepped.

        Raises:
            UserError: none of them holds some weight or gamma.
        """
        parameters = {
            id(parameter): (f"{name}.{kind}", parameter)
            for name, weight in self.weights.items()
            for kind, parameter in (("weight", weight.parameter), ("gamma", weight.gamma))
            if parameter is not None
        }
        followed, held = [], set()
        for optimizer in optimizers:
            while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # accelerate's wrapper
                optimizer = inner
            own = {id(p) for group in optimizer.param_groups for p in group["params"]} & parameters.keys()
            followed += [optimizer] if own else []
            held |= own
        for index, (name, parameter) in parameters.items():
            if parameter.requires_grad and index not in held:
                raise UserError(
                    f"no optimizer given to pc.schedule holds {name}; create optimizers after pc.attach and any "
                    "sharding, and give all that train the model"
                )
        self._optimizers += followed
        self._register(followed)

    def _register(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        has_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None  # args[0] is the optimizer
        self._is_stepping = not _only_creates_state(optimizer) and self._begin(has_closure)

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._is_stepping:
            return
        self._is_stepping = False
        self._stepped.add(optimizer)
        if self._stepped.issuperset(self._optimizers):
            self.materialise()
        else:
            self._set_phase(RAW)

    def _set_phase(self, phase: str) -> None:
        self.phase = phase
        for weight in self.weights.values():
            weight.require(NOT_READY if phase == RAW else "")
        if phase != RAW:
            self._has_started = True
            self._stepped.clear()

    def _require(self, call: str) -> None:
        if (call, self.phase) in REFUSED:
            raise UserError(REFUSED[call, self.phase])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """W (schedule "step"), gamma, u and v of every weight by name. The model's state dict has the weights.

        Before the first `materialise` it is only a target to load a state into, not a state to save.

        Raises:
            UserError: between `restore_raw` and `materialise`, when the model's state dict holds W.
        """
        if self._has_started:
            self._require("state_dict")
        return self._tensors()

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {key: getattr(weight, key).detach() for key in self.saved if getattr(weight, key) is not None}
            for name, weight in self.weights.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, dict[str, Tensor]]) -> None:
        """Load a state, before or after the model's state dict of the same step.

        Raises:
            UserError: weights or tensors are missing or unknown, or have another shape.
        """
        own = self._tensors()
        shapes, given = (
            {f"{name}.{key}": [*tensor.shape] for name, tensors in state.items() for key, tensor in tensors.items()}
            for state in (own, state_dict)
        )
        for key in shapes.keys() | given.keys():
            if shapes.get(key) != given.get(key):
                raise UserError(f"the PC state has {key} of shape {given.get(key)}, the model of {shapes.get(key)}")
        for name, tensors in own.items():
            for key, tensor in tensors.items():
                local(tensor).copy_(local(state_dict[name][key]))
        self._use_loaded()

    # What schedule "step" does differently:

    def start(self, weight: Weight) -> None:
        """Set the tensors of a weight."""
        layer = weight.module
        layer.start_pc()
        weight.raw, weight.u, weight.v = layer.weight, layer.u, layer.v

    def materialise(self) -> None:
        """Compute PC(W) of the current weights, after every optimizer step and once before the first forward pass."""
        for weight in self.weights.values():
            weight.module.refresh()
            weight.u, weight.v = weight.module.u, weight.module.v
        self._set_phase(PC)

    def pull_back(self) -> None:
        """Make gradients of PC(W) those of W and gamma, once per step, after the last backward pass, before clipping."""

    def restore_raw(self) -> None:
        """Write W into the weights, so that the optimizer steps and decays W."""

    def _use_loaded(self) -> None:
        """After a state was loaded: `u` and `v` are those that PC(W) was computed with."""
        self._set_phase(PC)

    def _begin(self, has_closure: bool) -> bool:
        """Before an optimizer's step; whether the step changes weights."""
        return True


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
