"""`attach` replaces linear layers of any model by PC layers; `merge` replaces them by plain layers again."""

import fnmatch
import sys
from importlib import import_module

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pc.config import BLOCK_GROUPS, BLOCK_SUFFIXES, PCConfig
from pc.errors import UserError
from pc.forward import refresh
from pc.linear import PCLinear, block_of, clean_name, effective_weight, named_pc_linears, refuse_shared_weights


def matches(entry: str, name: str) -> bool:
    """Whether an entry of `PCConfig.blocks` (block, group or full-name pattern) matches the layer `name`."""
    if entry in BLOCK_GROUPS:
        return block_of(name) in BLOCK_GROUPS[entry]
    if entry in BLOCK_SUFFIXES:
        return block_of(name) == entry
    return fnmatch.fnmatchcase(name, entry)


def attach(model: nn.Module, config: PCConfig, preserve: bool = False) -> nn.Module:
    """Replace the layers that `config.blocks` matches by `PCLinear`, in place; returns the model.

    The paper's block names work on TorchTitan's and Hugging Face's Llama-like models, full-name patterns on any module.
    Call it before wrapping with DDP, FSDP or torch.compile, and before creating the optimizer, which must hold the
    gammas. Schedule "forward" then needs nothing else, except on the meta device: call `pc.refresh` once the weights
    exist. Schedule "step" needs a `pc.StepSchedule` next. A forward pass before that raises `UserError`.

    Args:
        preserve: choose W so that PC(W) equals the current weight and the model's outputs do not change. Use it for
            trained weights. Otherwise the current weight becomes W.

    Raises:
        UserError: an entry matches nothing, a match is not an `nn.Linear` with a weight of its own, a layer is matched
            twice, a weight is shared with another layer, or the model is already wrapped; in schedule "forward", a
            layer of a module that reads its weight without calling it; with `preserve`, weights on the meta device, a
            map with g(1) other than 1, or no norm recovery.
    """
    modules = dict(model.named_modules())
    _refuse_wrapped(modules)
    chosen: dict[str, PCConfig] = {}
    for entry in config.blocks:
        found = [name for name in modules if matches(entry, clean_name(name))]
        if not found:
            raise UserError(f"pc.blocks: {entry!r} matches no layer of the model")
        for name in found:
            if isinstance(modules[name], PCLinear):
                raise UserError(f"pc.blocks: {name} already has PC; call pc.attach only once")
            if not isinstance(modules[name], nn.Linear):
                raise UserError(f"pc.blocks: {entry!r} matches {name}, a {type(modules[name]).__name__}, not nn.Linear")
            _refuse_unusable(modules, name, config.schedule)
            if name in chosen:
                raise UserError(f"pc.blocks: {entry!r} matches {name}, which an earlier entry matches too")
            chosen[name] = config.for_block(entry)
    refuse_shared_weights(model, [clean_name(name) for name in chosen])
    on_meta = any(p.device.type == "meta" for p in model.parameters())
    if preserve and on_meta:
        raise UserError("pc.attach(preserve=True) needs weights; on the meta device, call pc.preserve once they exist")
    start = import_module("pc.start") if preserve else None  # it imports torch.distributed.tensor, which takes a while
    if start:
        for layer_config in chosen.values():
            start.require_possible(layer_config)
    _replace(
        model,
        {
            modules[name]: PCLinear.from_linear(modules[name], clean_name(name), layer_config)
            for name, layer_config in chosen.items()
        },
    )
    if config.schedule == "step":
        # The forward pass does not use gammas, so DDP would wait for their gradients forever: `pull_back` sets them.
        gammas = [f"{name}.gamma" for name in chosen if model.get_submodule(name).gamma is not None]
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*ignored, *gammas])
    if start:
        start.preserve(model)
    elif config.schedule == "forward" and not on_meta:
        refresh(model)
    return model


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Replace every `PCLinear` by the layer that it was, now with PC(W), in place; returns the model.

    The result has no overhead and does not need this package (paper, remark 1).

    Raises:
        UserError: PC(W) is not computed yet, the weights hold W because an optimizer is stepping, or weights of
            schedule "forward" are sharded.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    for name, layer in named_pc_linears(model):
        if layer.missing_call:
            raise UserError(f"pc.merge cannot get PC(W) of {name}: {layer.missing_call}")
        weight = layer.weight
        if layer.pc_config.schedule == "forward":
            if hasattr(weight, "full_tensor"):
                raise UserError(f'pc.merge cannot get PC(W) of {name}: its weight is sharded; use schedule="step"')
            weight = effective_weight(weight, layer.gamma, layer.u, layer.v, layer.pc_config)
        replacements[layer] = layer.to_linear(weight)
    _replace(model, replacements)
    return model


def _replace(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Replace modules under every name that they have in the model."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacements[module])


def _refuse_wrapped(modules: dict[str, nn.Module]) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import; if nobody imported it, nothing is wrapped
    wrappers = (DistributedDataParallel, *((fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()))
    for module in modules.values():
        if isinstance(module, wrappers):
            kind = "DDP" if isinstance(module, DistributedDataParallel) else "FSDP"
            raise UserError(f"the model is already wrapped in {kind}; call pc.attach before {kind}")


def _refuse_unusable(modules: dict[str, nn.Module], name: str, schedule: str) -> None:
    if not name:
        raise UserError("pc.blocks: the model itself is the layer; put it into a module, such as nn.Sequential(model)")
    weight = modules[name]._parameters.get("weight")
    if weight is None or isinstance(weight, nn.parameter.UninitializedParameter):
        raise UserError(f"pc.blocks: {name} has no weight of its own yet (a lazy layer, or one with weight_norm)")
    parent = modules[name.rpartition(".")[0]]
    if schedule == "forward" and isinstance(parent, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        raise UserError(
            f"pc.blocks: {type(parent).__name__} reads {name}.weight without calling the layer, so without PC; use "
            'schedule="step"'
        )
