"""What users call: `attach` marks the weights of a model that get PC, `precondition` writes PC(W), `preserve` takes
the given weights as PC(W), `merge` leaves a plain model with PC(W), `detach` one with W."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from pc import followed
from pc.config import PCConfig
from pc.errors import UserError
from pc.guard import NO_PRECONDITIONER, Guard, remove_guards, run_guards
from pc.inverse import invert, require_invertible
from pc.owner import Plan
from pc.preconditioner import NotForDDP, Preconditioner, preconditioners_of, reshard
from pc.shards import local
from pc.targets import clean_name, find, require_complete
from pc.weight import Weight, added_names, named_weights, require_precision


def attach(model: nn.Module, config: PCConfig = PCConfig(), **settings: Any) -> nn.Module:
    """Mark the weights that `config.blocks` matches, in place; returns the model. Printing it shows them.

    Nothing else changes, but a forward pass raises until `pc.precondition` is called. Call `attach` before wrapping with
    DDP or FSDP.

    The current weight becomes W. For trained weights call `pc.preserve` before `pc.precondition`: it makes the current
    weight PC(W).

    Args:
        model: any module, also on the meta device.
        config: which weights get PC, and how.
        settings: none: a keyword raises an error that says how to give it as a `PCConfig`.

    Raises:
        UserError: the model has PC already, or is wrapped in DDP or FSDP; an entry of `blocks` matches no weight, or two
            match the same one; it is not known how a matched weight, or another of its module, is split into matrices
            (`PCConfig.splits`); a matched weight is computed from others, by torch's parametrize or prune. The model is then
            as before.
    """
    if settings:
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise UserError(f"pc.attach takes its settings as a pc.PCConfig: pc.attach(model, pc.PCConfig({given}))")
    targets, others = find(model, config)
    require_complete(config, targets, others)
    for target in targets.values():
        target.mark()
    for module in dict.fromkeys([model, *(target.module for target in targets.values())]):
        module.register_forward_pre_hook(Guard(NO_PRECONDITIONER), prepend=True)
    return model


@torch.inference_mode(False)  # Lightning evaluates in this mode, and tensors made in it cannot be trained
def precondition(
    models: nn.Module | Iterable[nn.Module],
    *optimizers: Optimizer | Iterable[Optimizer],
    process_group: dist.ProcessGroup | None = None,
) -> Preconditioner:
    """Add W and gamma to the weights that `pc.attach` has marked, and write PC(W) into them (`pc.weight`).

    From here on `weight` holds PC(W), and the optimizers train the parameters `weight_orig`, which is W, and
    `weight_gamma` (paper, algorithm 3). A model that already has W, such as a copy or one from `torch.load`, keeps it.

    Args:
        models: the model, or under pipeline parallelism a list of its parts on this rank; after any sharding, with
            weights off the meta device. If it is a `DistributedDataParallel`, its ranks share the work, except in `write_pc`.
        optimizers: all optimizers that train the model. The preconditioner follows them from now on (`follow`). Without
            optimizers, call `follow` later, or `write_pc` after each step.
        process_group: ranks that have equal weights and gradients, to share the work without DDP.

    Returns:
        The preconditioner: call its `pull_back` in each step.

    Raises:
        UserError: no weight is marked, or one is on the meta device, is below float32, is shared, or has a
            preconditioner already; the model is in FSDP1; the errors of `follow`. Model and optimizers are then as before.
    """
    models = _listed(models)
    weights = _require_usable(models)
    given = followed.unwrapped(optimizers)
    if given:
        followed.find_groups(weights, given)  # raises before anything is changed
    made = Preconditioner(models, process_group)
    if given:
        made.follow(*given)
    return made


def _listed(models: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    parts: Any = [models] if isinstance(models, nn.Module) else models
    if isinstance(parts, Iterable):
        parts = [*parts]
        if all(isinstance(part, nn.Module) for part in parts):
            return parts
    raise UserError(f"the first argument should be the model, or its parts, not a {type(models).__name__}")


def _require_usable(models: list[nn.Module]) -> list[Weight]:
    """The weights of models that can be trained with PC."""
    holders: dict[int, list[str]] = {}
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UserError("FSDP1 makes weights parts of one flat parameter; shard with fully_shard (FSDP2)")
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(clean_name(name))
    if preconditioners_of(*models):
        raise UserError(
            "the model has a preconditioner already; use that one. To start again: pc.merge (from PC(W)) or pc.detach "
            "(from W), then pc.attach"
        )
    weights = _weights(*models)
    if not weights:
        raise UserError("pc.precondition found no weight with PC; call pc.attach(model, pc.PCConfig(...)) first")
    first = weights[0]
    for weight in weights:
        if weight.effective.dtype != first.effective.dtype:
            raise UserError(
                f"{first.name} is {first.effective.dtype}, {weight.name} {weight.effective.dtype}; give weights with PC one "
                "dtype, or leave some out of blocks"
            )
        if weight.effective.is_meta:
            raise UserError(f"{weight.name} is on the meta device; call pc.precondition once the weights exist")
        require_precision(weight.name, weight.effective)
        if len(sharing := holders[id(weight.effective)]) > 1:
            raise UserError(
                f"{weight.name} shares its weight: {', '.join(sharing)}; PC needs a separate one: untie it, or leave it "
                "out of blocks"
            )
        if [other.name for other in weights].count(weight.name) > 1:
            raise UserError(
                f"two modules with PC have the name {weight.name}: call pc.attach on one module that holds both, such as an "
                "nn.ModuleDict, and only after modules were copied, as by peft (modules_to_save)"
            )
    return weights


@torch.inference_mode(False)  # as `precondition`
@torch.no_grad()
def preserve(models: nn.Module | Iterable[nn.Module]) -> None:
    """Treat each marked weight as PC(W): set W, u and v to match, and gamma to 1. `weight` stays as it is.

    Runs one singular value decomposition per matrix, on its owner rank. Call it once the weights exist, after DDP or
    FSDP and before `pc.precondition`; or, if you load given weights after `pc.precondition`, before the first step.

    Args:
        models: the model, or under pipeline parallelism a list of its parts on this rank.

    Raises:
        UserError: no weight is marked, no W exists for this method or these settings, or weights are on the meta device.
    """
    models = _listed(models)
    weights = _weights(*models)
    if not weights:
        raise UserError("pc.preserve found no weight with PC; call pc.attach(model, pc.PCConfig(...)) first")
    for weight in weights:
        for part in weight.split.chosen:
            require_invertible(part.method)
        if weight.effective.is_meta:
            raise UserError(f"{weight.name} is on the meta device; call pc.preserve once the weights exist")
    for weight in weights:
        weight.start()
    inputs = [(weight.effective,) for weight in weights]
    outputs = [(weight.orig, weight.u, weight.v) for weight in weights]
    Plan(inputs, outputs, [weight.split for weight in weights]).run(invert, inputs, outputs)
    for preconditioner in preconditioners_of(*models):
        preconditioner.note_loaded()


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's state dict with PC(W) under the names of a plain model, and without what PC has added.

    Returns:
        {name: tensor}, in the shapes and shards of the model; it shares memory with the model, as `state_dict()` does.

    Raises:
        UserError: there is no PC(W), or a weight was changed.
    """
    _ensure_pc(model)
    added = {clean_name(name) for name in added_names(model)}  # a wrapper may leave its prefix out of the state
    return {key: value for key, value in model.state_dict().items() if clean_name(key) not in added}


def merge(model: nn.Module) -> nn.Module:
    """Turn every layer back into the plain one that it was, with PC(W) as its weight, in place; returns the model.

    The result has no overhead and does not need this package (paper, remark 1). Optimizers get the plain parameters back.

    Raises:
        UserError: there is no PC(W), or a weight was changed. The model is then as before.
    """
    _ensure_pc(model)
    return _remove(model)


@torch.no_grad()
def detach(model: nn.Module) -> nn.Module:
    """Undo `attach` and `pc.precondition`: plain layers that hold W, in place; returns the model.

    Optimizers get the plain parameters back. Without `pc.precondition` the weights stay as they are.
    """
    for weight in _weights(model):
        if weight.orig is not None:
            local(weight.effective).copy_(local(weight.orig))
    return _remove(model)


def _weights(*models: nn.Module) -> list[Weight]:
    reshard(models)
    return [weight for model in models for _, weight in named_weights(model)]


def _ensure_pc(model: nn.Module) -> None:
    """Write PC(W) if it is not there yet. One rank may save alone, so ranks do not share this work."""
    for preconditioner in preconditioners_of(model):
        preconditioner.write_if_stale()
    run_guards(model)


def _remove(model: nn.Module) -> nn.Module:
    for preconditioner in preconditioners_of(model):
        preconditioner.leave()
    remove_guards(model.modules())
    for weight in _weights(model):
        weight.remove()
    for module in model.modules():
        # `vars`, because a wrapper such as peft's also shows the attributes of the module inside it
        if isinstance(vars(module).get("_ddp_params_and_buffers_to_ignore"), NotForDDP):
            del module._ddp_params_and_buffers_to_ignore
    return model
