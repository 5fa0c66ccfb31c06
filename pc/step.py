"""Schedule "step": PC once per optimizer step, because the weights change only then.

Between steps a layer's `weight` is PC(W), so forward and backward passes are those of a plain model, however
many micro-batches there are and however the model is parallelised. Around the optimizer's step:

    schedule = pc.StepSchedule(model)       # after attach and any sharding
    schedule.materialise()                  # W into store, PC(W) into weight
    for batches in data:
        for batch in batches:
            loss(model, batch).backward()   # gradients with respect to PC(W), summed and reduced as usual
        schedule.pull_back()                # ... become gradients of W and gamma; now clip
        schedule.restore_raw()              # W into weight, for the optimizer
        optimizer.step()
        optimizer.zero_grad()
        schedule.materialise()

Since one pull-back is linear in the gradient, the pull-back of the sum equals the sum of the pull-backs that
schedule "forward" makes. Full matrices are needed for both passes; `pc.owner` brings each to one rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pc import passes
from pc.config import PCConfig
from pc.errors import UserError
from pc.linear import PCLinear, named_pc_linears
from pc.owner import local, run_on_owners, sharding_dimensions
from pc.spectral import initial_vectors


@dataclass
class LayerState:
    """One preconditioned weight of shape [n, m]. All tensors are sharded as the parameter is."""

    config: PCConfig
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
    def gammas(self) -> tuple[Tensor, ...]:
        return () if self.gamma is None else (self.gamma,)


class StepSchedule:
    """Holds the raw weights of a model's PC layers and exchanges them with the effective ones.

    Args:
        models: the model, or the parts of it that this rank has under pipeline parallelism. Sharding is
            done and weights are off the meta device; they are read at the first `materialise`, so a
            checkpoint may be loaded in between.

    Raises:
        ValueError: a PC layer of another schedule, or parameters still on the meta device.
        UserError: weights of less than float32.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._fsdp_modules = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
        self.layers: dict[str, LayerState] = {}
        # After a forward pass without gradients FSDP may still hold unsharded parameters. The sharded
        # ones are captured here once.
        self._reshard()
        for model in models:
            for name, layer in named_pc_linears(model):
                self.layers[name] = _initial_state(name, layer)
        self.weights_are_raw = True
        self._started = False
        self._pulled_back = False

    @torch.no_grad()
    def materialise(self) -> None:
        """Take W from the weights into store, advance `u` and `v`, and write PC(W) into the weights.

        Call it before the first forward pass, unless a state was loaded, and after every optimizer step.
        """
        if not self.weights_are_raw:
            raise RuntimeError("materialise() with PC(W) in place already; restore_raw() and the optimizer come first")
        self._reshard()
        self._store_raw()
        layers = list(self.layers.values())
        run_on_owners(
            passes.materialise,
            inputs=[(s.raw, *s.gammas, s.u, s.v) for s in layers],
            outputs=[(s.weight, s.u, s.v) for s in layers],
            keys=[s.config for s in layers],
        )
        self.weights_are_raw = False
        self._started = True
        self._pulled_back = False

    @torch.no_grad()
    def pull_back(self) -> None:
        """Replace the gradient of PC(W) in `weight.grad` by that of W, and set `gamma.grad`.

        Call it once per step, when the gradients are complete, before clipping.
        """
        if self.weights_are_raw or self._pulled_back:
            raise RuntimeError("pull_back() goes between materialise() and restore_raw(), once per step")
        for name, state in self.layers.items():
            if state.weight.grad is None:
                raise RuntimeError(f"pull_back() found no gradient on {name}.weight; call it after backward()")
            if state.gamma is not None:
                state.gamma.grad = torch.zeros_like(state.gamma)
        layers = list(self.layers.values())
        run_on_owners(
            passes.pull_back,
            inputs=[(s.raw, s.weight.grad, *s.gammas, s.u, s.v) for s in layers],
            outputs=[(s.weight.grad, *(g.grad for g in s.gammas)) for s in layers],
            keys=[s.config for s in layers],
        )
        self._pulled_back = True

    @torch.no_grad()
    def restore_raw(self) -> None:
        """Write W into the weights: what the optimizer steps on and decays."""
        if self.weights_are_raw:
            raise RuntimeError("restore_raw() with W in place already")
        self._reshard()
        torch._foreach_copy_(*self._local_weights_and_raws())
        self.weights_are_raw = True

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """W, gamma, u and v of every layer by name. The weights themselves belong to the model's state dict.

        Before the first `materialise` it is what a state can be loaded into, and no state to save.

        Raises:
            RuntimeError: between `restore_raw` and `materialise`, when the model's state dict holds W.
        """
        if self.weights_are_raw and self._started:
            raise RuntimeError("state_dict() with W in place; call materialise() first")
        if self.weights_are_raw:
            self._store_raw()
        return self._tensors()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, dict[str, Tensor]]) -> None:
        """Take a state back. The model's state dict of the same moment holds the matching PC(W).

        Raises:
            KeyError: layers or tensors are missing or unknown.
        """
        own = self._tensors()
        if own.keys() != state_dict.keys():
            raise KeyError(f"PC state of other layers: {sorted(own.keys() ^ state_dict.keys())}")
        for name, tensors in own.items():
            if tensors.keys() != state_dict[name].keys():
                raise KeyError(f"PC state of {name} has {sorted(state_dict[name])}, not {sorted(tensors)}")
            for key, tensor in tensors.items():
                local(tensor).copy_(local(state_dict[name][key]))
        self.weights_are_raw = False
        self._started = True
        self._pulled_back = False

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {"raw": s.raw, **{"gamma": g.detach() for g in s.gammas}, "u": s.u, "v": s.v}
            for name, s in self.layers.items()
        }

    def _local_weights_and_raws(self) -> tuple[list[Tensor], list[Tensor]]:
        layers = self.layers.values()
        return [local(s.weight) for s in layers], [local(s.raw) for s in layers]

    @torch.no_grad()
    def _store_raw(self) -> None:
        weights, raws = self._local_weights_and_raws()
        if raws:
            torch._foreach_copy_(raws, weights)

    def _reshard(self) -> None:
        # A write to a shard is not seen while FSDP holds the unsharded parameter.
        for module in self._fsdp_modules:
            module.reshard()


def _initial_state(name: str, layer: PCLinear) -> LayerState:
    if layer.pc_config.schedule != "step":
        raise ValueError(f'{name} has schedule "{layer.pc_config.schedule}"; StepSchedule takes "step"')
    weight = layer.weight
    if weight.device.type == "meta":
        raise ValueError(f"{name}.weight is on the meta device; create StepSchedule after the weights exist")
    if weight.dtype.itemsize < 4:
        raise UserError(
            f"{name}.weight is {weight.dtype}; W collects small updates and needs float32 (model.float(), and "
            "autocast or FSDP's mixed precision for the products)"
        )
    u, v = (
        _distribute_like(weight, vector.to(weight.device, weight.dtype))
        for vector in initial_vectors(name, weight.shape)
    )
    return LayerState(layer.pc_config, weight, layer.gamma, weight.detach().clone(), u, v)


def _distribute_like(weight: Tensor, vector: Tensor) -> Tensor:
    """`vector` on the weight's mesh, sharded along the mesh dimension that shards the weight, if it is one."""
    if not isinstance(weight, DTensor):
        return vector
    dimensions = sharding_dimensions(weight)
    placements = [
        Shard(0) if dimensions == [dimension] else Replicate() for dimension in range(weight.device_mesh.ndim)
    ]
    return distribute_tensor(vector, weight.device_mesh, placements, src_data_rank=None)
