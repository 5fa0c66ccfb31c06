"""Schedule "step": compute PC(W) once per optimizer step, because the weights change only then.

Between steps a layer's `weight` is PC(W), so forward and backward passes are those of a plain model, for any number of
micro-batches and any parallelism. A training loop adds one call:

    schedule = pc.StepSchedule(model, optimizer)  # after attach and any sharding: saves W, writes PC(W) into weight
    for batches in data:
        for batch in batches:
            loss(model, batch).backward()         # gradients with respect to PC(W), accumulated and reduced as usual
        schedule.pull_back()                      # converts them to gradients of W and gamma; clip after this
        optimizer.step()                          # restore_raw() before: W into weight; materialise() after: PC(W)
        optimizer.zero_grad()

A loop that does not step `torch.optim` optimizers makes all calls itself: `pc.StepSchedule(model)` and
`materialise()` once; then in each step `pull_back()`, `restore_raw()`, the step, `materialise()`.

`pull_back` is linear in the gradient, so one call on the accumulated gradient equals the sum of the backward passes of
schedule "forward". Both passes need full matrices; `pc.owner` gathers each on one rank.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
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
    effective_weight,
    named_pc_linears,
    refuse_shared_weights,
)
from pc.owner import local, run_on_owners, sharding_dimensions
from pc.spectral import initial_vectors, without_autocast


@dataclass
class LayerState:
    """One preconditioned weight of shape [n, m]. All tensors are sharded like the parameter."""

    layer: PCLinear
    weight: Tensor
    """the layer's weight parameter: PC(W), or W during an optimizer step"""
    gamma: Tensor | None
    """the layer's gamma parameter [1]"""
    raw: Tensor
    """W [n, m]"""
    u: Tensor
    """estimate of the left singular vector [n]"""
    v: Tensor
    """estimate of the right singular vector [m]"""
    version: int = -1
    """of the weight when PC(W) was written into it; a tensor's version grows with each change in place"""

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
    """Stores the raw W of a model's PC layers and switches the weights between W and PC(W).

    Args:
        models: the model, or a list of its parts on this rank under pipeline parallelism; after sharding, with weights
            off the meta device.
        optimizers: all that train the model. The schedule follows them from now on (`follow`) and writes PC(W) into the
            weights. Without optimizers, the caller calls `materialise` before the first forward pass, and
            `restore_raw` and `materialise` around each step.

    A copy of the model alone can be evaluated, but not trained. To train a copy, copy all three together:
    `copy.deepcopy((model, optimizer, schedule))`.

    Raises:
        UserError: no PC layer, or a PC layer of another schedule, on the meta device, below float32, that shares its
            weight, or that already holds PC(W); FSDP1, or DDP that waits for gradients of gamma; those of `follow`.
    """

    def __init__(self, models: nn.Module | Iterable[nn.Module], *optimizers: Optimizer) -> None:
        models = [models] if isinstance(models, nn.Module) else list(models)
        self._fsdp_modules = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
        self.layers: dict[str, LayerState] = {}
        # Parameters are read once, here, and must be the sharded ones. After a forward pass without gradients FSDP may
        # still hold unsharded ones.
        self._reshard()
        for model in models:
            _refuse_wrappers(model)
            found = dict(named_pc_linears(model))
            refuse_shared_weights(model, found)
            if both := found.keys() & self.layers.keys():
                raise UserError(f"two models have a PC layer {min(both)}; give each model its own pc.StepSchedule")
            self.layers |= {name: _initial_state(name, layer) for name, layer in found.items()}
        if not self.layers:
            raise UserError(
                'pc.StepSchedule found no PC layer; first pc.attach(model, pc.PCConfig(..., schedule="step"))'
            )
        self.weights_are_raw = True
        self._started = False
        self._follows = False
        self._open: list[Optimizer] = []
        self._to_step: set[int] = set()
        self._pulled_back: Tensor | None = None
        self._gradients_are_raw = False
        self._set_missing_call(MATERIALISE)
        self._observe()
        if optimizers:
            self.follow(*optimizers)
            self.materialise()

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._observe()  # a copy

    def _observe(self) -> None:
        optimizer_hooks.observe_as_schedule(self)
        schedule = weakref.ref(self)

        def note_backward(_: Tensor) -> None:
            if (found := schedule()) is not None:
                found._gradients_are_raw = False

        for state in self.layers.values():
            if state.weight.requires_grad:
                state.weight.register_post_accumulate_grad_hook(note_backward)

    def follow(self, *optimizers: Optimizer) -> None:
        """From now on restore W before a step of these optimizers, and materialise after all of them have stepped.

        Raises:
            UserError: none of them holds some weight or gamma.
        """
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        for index, name in self._trained().items():
            if index not in held:
                raise UserError(
                    f"no optimizer given to pc.StepSchedule holds {name}; create optimizers after pc.attach and any "
                    "sharding, and give all that train the model"
                )
        for optimizer in optimizers:
            optimizer_hooks.go_before_later_hooks(optimizer)
        self._follows = True

    @torch.no_grad()
    def materialise(self) -> None:
        """Save W from the weights, advance `u` and `v`, and write PC(W) into the weights.

        Call it once before the first forward pass, unless a state is loaded, and after every optimizer step.

        Raises:
            UserError: the weights already hold PC(W).
        """
        if not self.weights_are_raw:
            loaded = {name for name, s in self.layers.items() if s.layer.missing_call == LOAD_STATE}
            if not loaded:
                raise UserError(
                    "materialise() while the weights hold PC(W); call restore_raw() and optimizer.step() first"
                )
            self._write_raw(self.layers.keys() - loaded)
        self._require_same_weights()
        self._reshard()
        self._store_raw()
        layers = list(self.layers.values())
        with without_autocast(layers[0].raw):
            run_on_owners(
                passes.materialise,
                inputs=[(s.raw, *s.gammas, s.u, s.v) for s in layers],
                outputs=[(s.weight, s.u, s.v) for s in layers],
                keys=[s.config for s in layers],
            )
        for state in layers:
            state.layer.weight_was_loaded = False
        self._set_missing_call("")
        self._note_written()
        self._open = []

    @torch.no_grad()
    def pull_back(self) -> None:
        """Replace the gradient of PC(W) in `weight.grad` by that of W, and set `gamma.grad`.

        Call it once per step, after the last backward pass and before clipping.

        Raises:
            UserError: the weights hold W, there are no gradients, or they are already pulled back.
        """
        if self.weights_are_raw:
            raise UserError("pull_back() while the weights hold W; call materialise() and backward() first")
        self._require_same_weights()
        layers = {name: s for name, s in self.layers.items() if s.is_trained}
        without = [name for name, s in layers.items() if s.weight.grad is None]
        if without and (len(without) == len(layers) or isinstance(layers[without[0]].weight, DTensor)):
            raise UserError(
                f"pull_back() found no gradient on {without[0]}.weight; call it after backward() (a frozen weight "
                "needs a frozen gamma; under FSDP every layer must have been used)"
            )
        used = [s for s in layers.values() if s.weight.grad is not None]
        if self._is_pulled_back(used):
            raise UserError(
                "pull_back() on gradients that are already those of W; call it once per step, after the last "
                "micro-batch, and optimizer.zero_grad() before the next backward(); with learnable_gamma=False that "
                'must set gradients to None; a loss that contains a gamma itself needs schedule="forward"'
            )
        gradients = [(s.weight.grad, *(torch.zeros_like(gamma) for gamma in s.gammas)) for s in used]
        with without_autocast(next(iter(self.layers.values())).raw):
            run_on_owners(
                passes.pull_back,
                inputs=[(s.raw, g, *s.gammas, s.u, s.v) for s, (g, *_) in zip(used, gradients, strict=True)],
                outputs=gradients,
                keys=[s.config for s in used],
            )
        for state, given in zip(used, gradients, strict=True):
            for parameter, gradient in zip((state.weight, *state.gammas), given, strict=True):
                parameter.grad = gradient if parameter.requires_grad else None
            self._pulled_back = state.weight.grad
        self._gradients_are_raw = True

    @torch.no_grad()
    def restore_raw(self) -> None:
        """Write W into the weights, so that the optimizer steps and decays W.

        Raises:
            UserError: the weights already hold W, there are gradients of PC(W), or a weight is no longer PC(W).
        """
        if self.weights_are_raw:
            raise UserError("restore_raw() while the weights already hold W")
        if self._has_gradients_of_pc():
            raise UserError("restore_raw() while there are gradients of PC(W); call schedule.pull_back() first")
        self._require_same_weights()
        self._require_unchanged()
        self._write_raw(self.layers)
        self._set_missing_call(UNFINISHED if self._follows else MATERIALISE)
        self.weights_are_raw = True
        self._to_step = set(self._trained())

    def before_step(self, optimizer: Optimizer, parameters: set[int], has_closure: bool) -> None:
        """For `pc.optimizer_hooks`: restore W if the gradients were pulled back."""
        if not self._follows or not parameters & self._trained().keys():
            return
        if has_closure:
            raise UserError(
                f"{type(optimizer).__name__}.step(closure) computes gradients while the weights hold W; in schedule "
                '"step" call backward() and schedule.pull_back() before optimizer.step(), or use schedule="forward"'
            )
        if not self.weights_are_raw:
            if self._has_gradients_of_pc():
                raise UserError(
                    f"{type(optimizer).__name__}.step() without schedule.pull_back() since the last backward(); it "
                    "converts the gradients of PC(W) to those of W: call it once per step, before clipping"
                )
            if all(s.weight.grad is None for s in self.layers.values()):
                return  # no PC layer changes
            self.restore_raw()
        self._open = [other for other in self._open if other is not optimizer] + [optimizer]

    def after_step(self, optimizer: Optimizer, parameters: set[int], began: int) -> None:
        """For `pc.optimizer_hooks`: materialise once all trained weights and gammas have stepped."""
        if optimizer not in self._open:
            return
        self._open.remove(optimizer)
        self._to_step -= parameters
        # Not after an optimizer nested in another one's step: the outer one may still all-gather weights.
        if not self._open and not self._to_step and self.weights_are_raw:
            self.materialise()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """W, gamma, u and v of every layer by name. The weights themselves belong to the model's state dict.

        Before the first `materialise` it is only a target to load a state into, not a state to save.

        Raises:
            UserError: between `restore_raw` and `materialise`, when the model's state dict holds W.
        """
        if self.weights_are_raw and self._started:
            raise UserError("state_dict() while the weights hold W; call materialise() first")
        if self.weights_are_raw:
            self._store_raw()
        return self._tensors()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, dict[str, Tensor]]) -> None:
        """Load a state. Also load the model's state dict saved at the same step, which holds the matching PC(W).

        Raises:
            UserError: layers or tensors are missing or unknown.
        """
        own = self._tensors()
        if own.keys() != state_dict.keys():
            raise UserError(f"the PC state and the model differ in layers {sorted(own.keys() ^ state_dict.keys())}")
        for name, tensors in own.items():
            if tensors.keys() != state_dict[name].keys():
                raise UserError(f"PC state of {name} has {sorted(state_dict[name])}, not {sorted(tensors)}")
            for key, tensor in tensors.items():
                if tensor.shape != state_dict[name][key].shape:
                    raise UserError(
                        f"PC state of {name}: {key} has shape {[*state_dict[name][key].shape]}, not {[*tensor.shape]}"
                    )
                local(tensor).copy_(local(state_dict[name][key]))
        for state in self.layers.values():
            state.layer.missing_call = "" if state.layer.weight_was_loaded else LOAD_WEIGHT
            state.layer.weight_was_loaded = False
        self._note_written()

    def _trained(self) -> dict[int, str]:
        """`id` and name of each trainable weight and gamma."""
        return {
            id(parameter): f"{name}.{kind}"
            for name, s in self.layers.items()
            for kind, parameter in (("weight", s.weight), ("gamma", s.gamma))
            if parameter is not None and parameter.requires_grad
        }

    def _has_gradients_of_pc(self) -> bool:
        return not self._gradients_are_raw and any(s.weight.grad is not None for s in self.layers.values())

    def _is_pulled_back(self, states: list[LayerState]) -> bool:
        """Whether zero_grad() is missing since `pull_back`, the only one that gives gammas a gradient."""
        gammas = [gamma for state in states for gamma in state.gammas if gamma.requires_grad]
        if not gammas:
            return any(state.weight.grad is self._pulled_back for state in states)
        given = [local(gamma.grad).flatten() for gamma in gammas if gamma.grad is not None]
        return bool(given) and not given[0].is_meta and bool(torch.cat(given).any())

    def _note_written(self) -> None:
        self.weights_are_raw = False
        self._started = True
        self._gradients_are_raw = False
        for state in self.layers.values():
            state.version = state.weight._version

    def _require_same_weights(self) -> None:
        """Raise if a layer has another parameter than at the start. FSDP itself swaps sharded ones."""
        for name, s in self.layers.items():
            if not isinstance(s.weight, DTensor) and s.layer.weight is not s.weight:
                raise UserError(
                    f"{name}.weight was replaced after pc.StepSchedule was created; create the schedule after FSDP and "
                    "whatever else replaces parameters"
                )
            if (s.weight.dtype, s.weight.device) != (s.raw.dtype, s.raw.device):
                raise UserError(
                    f"{name}.weight moved from {s.raw.dtype} on {s.raw.device} to {s.weight.dtype} on "
                    f"{s.weight.device} after pc.StepSchedule was created; move the model before"
                )

    def _require_unchanged(self) -> None:
        """Raise if the caller or DDP changed weights in place since PC(W) was written; the change would be lost.

        Only unsharded weights: a DTensor's version does not count changes of its shard.
        """
        for name, s in self.layers.items():
            if isinstance(s.weight, DTensor) or s.weight._version == s.version:
                continue
            expected = effective_weight(s.raw, s.gamma, s.u, s.v, s.config)
            tolerance = 1e-3 if s.config.compute_dtype == "float32" else 3e-2  # rounding; a weight swapped in and out
            if (s.weight - expected).norm() > tolerance * expected.norm():
                raise UserError(
                    f"{name}.weight was changed while it held PC(W), and the optimizer steps W: create pc.StepSchedule "
                    "after initialisation and DDP, and change weights between restore_raw() and materialise()"
                )
            s.version = s.weight._version

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
        # While FSDP holds the unsharded parameter, a write to the shard has no effect.
        for module in self._fsdp_modules:
            module.reshard()


def _initial_state(name: str, layer: PCLinear) -> LayerState:
    if layer.pc_config.schedule != "step":
        raise UserError(f'{name} has pc.schedule = "{layer.pc_config.schedule}"; pc.StepSchedule needs "step"')
    weight = layer.weight
    if weight.device.type == "meta":
        raise UserError(f"{name}.weight is on the meta device; create pc.StepSchedule after the weights exist")
    if layer.missing_call not in (MAKE_SCHEDULE, MATERIALISE):
        raise UserError(
            f"{name}.weight holds PC(W), and another pc.StepSchedule holds its W; use that one. To copy a model: "
            "copy.deepcopy((model, optimizer, schedule)). To start again from PC(W): pc.merge, then pc.attach"
        )
    if weight.dtype.itemsize < 4:
        raise UserError(
            f"{name}.weight is {weight.dtype}, but W needs float32 to accumulate small updates; call model.float(), "
            "and use autocast or FSDP's mixed precision for fast matmuls"
        )
    u, v = (
        _distribute_like(weight, vector.to(weight.device, weight.dtype))
        for vector in layer.start_vectors or initial_vectors(name, (layer.out_features, layer.in_features))
    )
    return LayerState(layer, weight, layer.gamma, weight.detach().clone(), u, v)


def _distribute_like(weight: Tensor, vector: Tensor) -> Tensor:
    """`vector` as a DTensor, sharded along every mesh dimension that shards the weight."""
    if not isinstance(weight, DTensor):
        return vector
    dimensions = sharding_dimensions(weight)
    placements = [Shard(0) if d in dimensions else Replicate() for d in range(weight.device_mesh.ndim)]
    return distribute_tensor(vector, weight.device_mesh, placements, src_data_rank=None)


def _refuse_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UserError(f"{name or 'the model'} is wrapped in FSDP1; use torch.distributed.fsdp.fully_shard")
        if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
            continue
        for layer_name, layer in module.module.named_modules():
            gamma = f"{layer_name}.gamma"
            if isinstance(layer, PCLinear) and layer.gamma is not None and gamma not in module.parameters_to_ignore:
                raise UserError(
                    f"DDP would wait for a gradient of {gamma}, which pull_back() sets: call pc.attach on the module "
                    "that DDP wraps (torch.compile after DDP), or pass find_unused_parameters=True to DDP"
                )
