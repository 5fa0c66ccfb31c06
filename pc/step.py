"""Schedule "step": PC once per optimizer step, because the weights change only then.

Between steps a layer's `weight` is PC(W), so forward and backward passes are those of a plain model, however
many micro-batches there are and however the model is parallelised. A training loop adds one call:

    schedule = pc.StepSchedule(model, optimizer)  # after attach and any sharding: saves W, writes PC(W) into weight
    for batches in data:
        for batch in batches:
            loss(model, batch).backward()         # gradients with respect to PC(W), summed and reduced as usual
        schedule.pull_back()                      # ... become gradients of W and gamma; now clip
        optimizer.step()                          # restore_raw() before: W into weight; materialise() after: PC(W)
        optimizer.zero_grad()

A loop whose steps are not those of `torch.optim` optimizers makes all calls itself: `pc.StepSchedule(model)`, and
`materialise()`; then in each step `pull_back()`, `restore_raw()`, the step, `materialise()`.

Since one pull-back is linear in the gradient, the pull-back of the sum equals the sum of the pull-backs that
schedule "forward" makes. Full matrices are needed for both passes; `pc.owner` brings each to one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from pc import optimizer_hooks, passes
from pc.config import PCConfig
from pc.errors import UserError
from pc.linear import (
    LOAD_STATE,
    LOAD_WEIGHT,
    MAKE_SCHEDULE,
    MATERIALISE,
    UNFINISHED,
    PCLinear,
    named_pc_linears,
)
from pc.owner import local, run_on_owners, sharding_dimensions
from pc.spectral import initial_vectors


@dataclass
class LayerState:
    """One preconditioned weight of shape [n, m]. All tensors are sharded as the parameter is."""

    layer: PCLinear
    weight: Tensor
    """the layer's parameter; holds PC(W), or W while the optimizer steps"""
    gamma: Tensor | None
    """the layer's parameter [1]"""
    raw: Tensor
    """W [n, m]"""
    u: Tensor
    """left singular vector estimate [n]"""
    v: Tensor
    """right singular vector estimate [m]"""

    @property
    def config(self) -> PCConfig:
        return self.layer.pc_config

    @property
    def gammas(self) -> tuple[Tensor, ...]:
        return () if self.gamma is None else (self.gamma,)

    @property
    def is_trained(self) -> bool:
        return self.weight.requires_grad or any(gamma.requires_grad for gamma in self.gammas)


class StepSchedule:
    """Holds the raw weights of a model's PC layers and exchanges them with the effective ones.

    Args:
        models: the model, or a list of the parts of it that this rank has under pipeline parallelism. Sharding is
            done and weights are off the meta device.
        optimizers: those that train the model; they are followed from now on (`follow`), and PC(W) is put in place.
            Without any, `materialise` reads the weights when it is first called, and `restore_raw` and `materialise`
            around each step are left to the caller.

    A copy of a model without its schedule can be evaluated, but not trained; copied together,
    `copy.deepcopy((model, optimizer, schedule))`, all three go on as the originals do.

    Raises:
        UserError: no PC layer, PC layers of another schedule, on the meta device, of less than float32, or of a model
            that has PC(W) in place already; those of `follow`.
    """

    def __init__(self, models: nn.Module | Iterable[nn.Module], *optimizers: Optimizer) -> None:
        models = [models] if isinstance(models, nn.Module) else list(models)
        self._fsdp_modules = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
        self.layers: dict[str, LayerState] = {}
        # After a forward pass without gradients FSDP may still hold unsharded parameters. The sharded
        # ones are captured here once.
        self._reshard()
        for model in models:
            for name, layer in named_pc_linears(model):
                self.layers[name] = _initial_state(name, layer)
        if not self.layers:
            raise UserError(
                'pc.StepSchedule found no PC layer; pc.attach(model, pc.PCConfig(..., schedule="step")) first'
            )
        self.weights_are_raw = True
        self._started = False
        self._follows = False
        self._open: list[Optimizer] = []
        self._to_step: set[int] = set()
        self._pulled_back: Tensor | None = None
        self._set_missing_call(MATERIALISE)
        optimizer_hooks.observe_as_schedule(self)
        if optimizers:
            self.follow(*optimizers)
            self.materialise()

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        optimizer_hooks.observe_as_schedule(self)  # a copy

    def follow(self, *optimizers: Optimizer) -> None:
        """From now on restore W before a step of these optimizers, and materialise when each of them has stepped.

        Raises:
            UserError: a weight or gamma that none of them holds.
        """
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        for index, name in self._trained().items():
            if index not in held:
                raise UserError(
                    f"no optimizer given to pc.StepSchedule holds {name}; make optimizers after pc.attach and any sharding, "
                    "and give all that train the model"
                )
        for optimizer in optimizers:
            optimizer_hooks.go_before_later_hooks(optimizer)
        self._follows = True

    @torch.no_grad()
    def materialise(self) -> None:
        """Save W from the weights, advance `u` and `v`, and write PC(W) into the weights.

        Once before the first forward pass, unless a state is loaded, and after every optimizer step.

        Raises:
            UserError: PC(W) is in place.
        """
        if not self.weights_are_raw:
            loaded = {name for name, s in self.layers.items() if s.layer.missing_call == LOAD_STATE}
            if not loaded:
                raise UserError("materialise() with PC(W) in place already; restore_raw() and the optimizer come first")
            self._write_raw(self.layers.keys() - loaded)
        self._reshard()
        self._store_raw()
        layers = list(self.layers.values())
        run_on_owners(
            passes.materialise,
            inputs=[(s.raw, *s.gammas, s.u, s.v) for s in layers],
            outputs=[(s.weight, s.u, s.v) for s in layers],
            keys=[s.config for s in layers],
        )
        for state in layers:
            state.layer.weight_was_loaded = False
        self._set_missing_call("")
        self.weights_are_raw = False
        self._started = True
        self._pulled_back = None
        self._open = []

    @torch.no_grad()
    def pull_back(self) -> None:
        """Replace the gradient of PC(W) in `weight.grad` by that of W, and set `gamma.grad`.

        Call it once per step, when the gradients are complete, before clipping.

        Raises:
            UserError: PC(W) is not in place, a layer has no gradient, or these gradients are pulled back already.
        """
        if self.weights_are_raw:
            raise UserError("pull_back() with W in place; materialise() and backward() come first")
        layers = {name: s for name, s in self.layers.items() if s.is_trained}
        gradients: list[tuple[Tensor, ...]] = []  # of each layer's weight and gammas
        for name, state in layers.items():
            gradient = state.weight.grad
            if gradient is None:
                raise UserError(
                    f"pull_back() found no gradient on {name}.weight; call it after backward() (a frozen weight needs a "
                    "frozen gamma)"
                )
            if gradient is self._pulled_back:
                raise UserError(
                    "pull_back() on gradients that are those of W already; once per step, after the last micro-batch, "
                    "and optimizer.zero_grad() before the next backward()"
                )
            gradients.append((gradient, *(torch.zeros_like(gamma) for gamma in state.gammas)))
        run_on_owners(
            passes.pull_back,
            inputs=[(s.raw, g, *s.gammas, s.u, s.v) for s, (g, *_) in zip(layers.values(), gradients, strict=True)],
            outputs=gradients,
            keys=[s.config for s in layers.values()],
        )
        for state, given in zip(layers.values(), gradients, strict=True):
            for parameter, gradient in zip((state.weight, *state.gammas), given, strict=True):
                parameter.grad = gradient if parameter.requires_grad else None
            self._pulled_back = state.weight.grad

    @torch.no_grad()
    def restore_raw(self) -> None:
        """Write W into the weights: what the optimizer steps on and decays.

        Raises:
            UserError: W is in place, or there are gradients of PC(W) still.
        """
        if self.weights_are_raw:
            raise UserError("restore_raw() with W in place already")
        if self._has_gradients_of_pc():
            raise UserError("restore_raw() with gradients of PC(W); call schedule.pull_back() first")
        self._write_raw(self.layers)
        self._set_missing_call(UNFINISHED if self._follows else MATERIALISE)
        self.weights_are_raw = True
        self._pulled_back = None
        self._to_step = set(self._trained())

    def before_step(self, optimizer: Optimizer, parameters: set[int]) -> None:
        """For `pc.optimizer_hooks`: W in place, if this is a step that was prepared."""
        if not self._follows or not parameters & self._trained().keys():
            return
        if not self.weights_are_raw:
            if self._has_gradients_of_pc():
                raise UserError(
                    f"{type(optimizer).__name__}.step() without schedule.pull_back(), which makes the gradients of PC(W) "
                    "those of W: call it after the last backward() of a step, before clipping"
                )
            if all(s.weight.grad is None for s in self.layers.values()):
                return  # nothing of PC moves
            self.restore_raw()
        self._open = [other for other in self._open if other is not optimizer] + [optimizer]

    def after_step(self, optimizer: Optimizer, parameters: set[int], began: int) -> None:
        """For `pc.optimizer_hooks`: PC(W) in place, once all that PC trains has stepped."""
        if optimizer not in self._open:
            return
        self._open.remove(optimizer)
        self._to_step -= parameters
        # An optimizer within another's step is not the end of it: the outer one may still send weights around.
        if not self._open and not self._to_step and self.weights_are_raw:
            self.materialise()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """W, gamma, u and v of every layer by name. The weights themselves belong to the model's state dict.

        Before the first `materialise` it is what a state can be loaded into, and no state to save.

        Raises:
            UserError: between `restore_raw` and `materialise`, when the model's state dict holds W.
        """
        if self.weights_are_raw and self._started:
            raise UserError("state_dict() with W in place; call materialise() first")
        if self.weights_are_raw:
            self._store_raw()
        return self._tensors()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, dict[str, Tensor]]) -> None:
        """Take a state back. The model's state dict of the same moment holds the matching PC(W), and is loaded too.

        Raises:
            UserError: layers or tensors are missing or unknown.
        """
        own = self._tensors()
        if own.keys() != state_dict.keys():
            raise UserError(f"PC state of other layers: {sorted(own.keys() ^ state_dict.keys())}")
        for name, tensors in own.items():
            if tensors.keys() != state_dict[name].keys():
                raise UserError(f"PC state of {name} has {sorted(state_dict[name])}, not {sorted(tensors)}")
            for key, tensor in tensors.items():
                local(tensor).copy_(local(state_dict[name][key]))
        for state in self.layers.values():
            state.layer.missing_call = "" if state.layer.weight_was_loaded else LOAD_WEIGHT
            state.layer.weight_was_loaded = False
        self.weights_are_raw = False
        self._started = True
        self._pulled_back = None

    def _trained(self) -> dict[int, str]:
        """The `id` and name of each parameter of PC layers that optimizers change."""
        return {
            id(parameter): f"{name}.{kind}"
            for name, s in self.layers.items()
            for kind, parameter in (("weight", s.weight), ("gamma", s.gamma))
            if parameter is not None and parameter.requires_grad
        }

    def _has_gradients_of_pc(self) -> bool:
        return self._pulled_back is None and any(s.weight.grad is not None for s in self.layers.values())

    def _set_missing_call(self, call: str) -> None:
        for state in self.layers.values():
            state.layer.missing_call = call

    @torch.no_grad()
    def _write_raw(self, names: Iterable[str]) -> None:
        self._reshard()
        states = [self.layers[name] for name in names]
        if states:
            torch._foreach_copy_([local(s.weight) for s in states], [local(s.raw) for s in states])

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {"raw": s.raw, **{"gamma": g.detach() for g in s.gammas}, "u": s.u, "v": s.v}
            for name, s in self.layers.items()
        }

    @torch.no_grad()
    def _store_raw(self) -> None:
        states = self.layers.values()
        if states:
            torch._foreach_copy_([local(s.raw) for s in states], [local(s.weight) for s in states])

    def _reshard(self) -> None:
        # A write to a shard is not seen while FSDP holds the unsharded parameter.
        for module in self._fsdp_modules:
            module.reshard()


def _initial_state(name: str, layer: PCLinear) -> LayerState:
    if layer.pc_config.schedule != "step":
        raise UserError(f'{name} has pc.schedule = "{layer.pc_config.schedule}"; pc.StepSchedule takes "step"')
    weight = layer.weight
    if weight.device.type == "meta":
        raise UserError(f"{name}.weight is on the meta device; create pc.StepSchedule after the weights exist")
    if layer.missing_call not in (MAKE_SCHEDULE, MATERIALISE):
        raise UserError(
            f"{name}.weight holds PC(W), and another pc.StepSchedule has its W; use that one, or to copy a model: "
            "copy.deepcopy((model, optimizer, schedule)), or start from the plain weights: pc.merge, then pc.attach"
        )
    if weight.dtype.itemsize < 4:
        raise UserError(
            f"{name}.weight is {weight.dtype}; W collects small updates and needs float32 (model.float(), and "
            "autocast or FSDP's mixed precision for the products)"
        )
    u, v = (
        _distribute_like(weight, vector.to(weight.device, weight.dtype))
        for vector in layer.start_vectors or initial_vectors(name, (layer.out_features, layer.in_features))
    )
    return LayerState(layer, weight, layer.gamma, weight.detach().clone(), u, v)


def _distribute_like(weight: Tensor, vector: Tensor) -> Tensor:
    """`vector` on the weight's mesh, sharded along every mesh dimension that shards the weight."""
    if not isinstance(weight, DTensor):
        return vector
    dimensions = sharding_dimensions(weight)
    placements = [Shard(0) if d in dimensions else Replicate() for d in range(weight.device_mesh.ndim)]
    return distribute_tensor(vector, weight.device_mesh, placements, src_data_rank=None)
