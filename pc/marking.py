"""`attach` marks the weights of any model that get PC, `preserve` makes the current weights PC(W), `merge` makes the
model a plain one with PC(W), `detach` a plain one with W."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pc import owner_functions
from pc.config import PCConfig
from pc.errors import UserError
from pc.layer import PCLinear
from pc.owner import Plan
from pc.targets import find, require_complete
from pc.weight import Weight, named_weights


def attach(model: nn.Module, config: PCConfig) -> nn.Module:
    """Mark the weights that `config.blocks` matches, in place; returns the model.

    In mode "step" nothing else changes. In mode "forward" an `nn.Linear` becomes a `pc.PCLinear`. Forward passes
    are refused until `pc.precondition` is called. Call `attach` before wrapping with DDP or FSDP.

    The current weight becomes W. For trained weights call `pc.preserve` next: it makes the current weight PC(W).

    Raises:
        UserError: the model is then as before.
            - The model has PC already, or is wrapped in DDP or FSDP.
            - An entry of `blocks` matches no weight, or two match the same one.
            - It is not known how a matched weight, or one beside it, is split into matrices (`PCConfig.splits`).
            - In mode "forward": not an `nn.Linear`'s weight, several matrices, or used without a call of their layer.
    """
    for module in model.modules():
        if hasattr(module, "pc_weights"):
            raise UserError("the model already has PC; call pc.attach only once, or pc.detach first")
        if hasattr(module, "no_sync") or hasattr(module, "unshard"):
            raise UserError("the model is already wrapped in DDP or FSDP; call pc.attach first")
    targets, others = find(model, config)
    require_complete(config, targets, others)
    if config.mode == "forward":
        # these use the weights of modules inside them without calling those modules
        readers = [m for m in model.modules() if isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer))]
        not_called = {module for reader in readers for module in reader.modules()}
        for target in targets.values():
            _require_called(target, not_called)
    for index, target in enumerate(targets.values()):
        target.mark([target.module, *([model] if index == 0 else [])])
    return model


def _require_called(target: Weight, not_called: set[nn.Module]) -> None:
    module = target.module
    is_plain = type(module).forward is nn.Linear.forward and target.attribute == "weight" and module not in not_called
    if not is_plain or [part.count for part in target.split.parts] != [1]:
        raise UserError(
            f'pc.mode = "forward" multiplies by PC(W) of one matrix, in the call of its layer, which {target.name}, '
            f'a {type(module).__name__}, does not allow; use "step"'
        )


@torch.no_grad()
def preserve(models: nn.Module | Iterable[nn.Module]) -> None:
    """Treat each marked weight as PC(W): write the matching W into it, and its leading singular vectors into u, v.

    Runs one singular value decomposition per matrix, on its owner rank.

    Args:
        models: the model or its parts, with the given weights, before PC(W) is first written: before
            `pc.precondition(model, optimizer)`; if sharded, after `pc.precondition(model)` and before
            `follow(optimizer)`.

    Raises:
        UserError: no W exists for this method or these settings, or weights are on the meta device, or sharded and
            without a preconditioner. Weights are then as before.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    weights = [weight for model in models for _, weight in named_weights(model)]
    for weight in weights:
        for part in weight.split.chosen:
            part.method.require_invertible()
        if weight.parameter.is_meta:
            raise UserError(f"{weight.name} is on the meta device; call pc.preserve once the weights exist")
        if weight.preconditioner is not None and weight.preconditioner.has_started:
            raise UserError(
                f"{weight.name} holds PC(W) already; call pc.preserve before pc.precondition(model, optimizer)"
            )
        if weight.preconditioner is None and isinstance(weight.parameter, DTensor):
            raise UserError(f"{weight.name} is sharded; call pc.precondition(model) before pc.preserve")
    for weight in weights:
        if isinstance(weight.module, PCLinear):
            weight.module.start_pc()
            weight.u, weight.v = weight.module.u, weight.module.v
        elif weight.u is None:
            weight.u = weight.parameter.new_empty(weight.split.u_shape)
            weight.v = weight.parameter.new_empty(weight.split.v_shape)
        weight.is_loaded_pc = False
    inputs = [(weight.parameter,) for weight in weights]
    outputs = [(weight.parameter, weight.u, weight.v) for weight in weights]
    Plan(inputs, outputs, [weight.split for weight in weights]).run(owner_functions.invert, inputs, outputs)
    for weight in weights:
        if weight.gamma is not None:
            weight.gamma.fill_(1.0)


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Make every weight the plain parameter PC(W) of a layer as it was before `attach`, in place; returns the model.

    The result has no overhead and does not need this package (paper, remark 1). The preconditioner leaves the
    optimizers.

    Raises:
        UserError: there is no preconditioner, a weight was changed while it held PC(W), or weights of mode "forward"
            are sharded. The model is then as before.
    """
    weights = [weight for _, weight in named_weights(model)]
    for weight in weights:
        weight.ensure_pc()
        if isinstance(weight.module, PCLinear) and isinstance(weight.module.weight, DTensor):
            raise UserError(f'pc.merge cannot get PC(W) of {weight.name}: its weight is sharded; use mode="step"')
    for preconditioner in {weight.preconditioner for weight in weights if weight.preconditioner is not None}:
        preconditioner.require_unchanged(alone=True)  # no collective: one rank may merge alone
    for weight in weights:
        if isinstance(weight.module, PCLinear):
            weight.module.weight.copy_(weight.module.effective_weight())
    _remove(weights)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Undo `attach` and `pc.precondition`: plain layers that hold W, in place; returns the model."""
    weights = [weight for _, weight in named_weights(model)]
    for preconditioner in {weight.preconditioner for weight in weights if weight.preconditioner is not None}:
        preconditioner.write_raw()
    _remove(weights)
    return model


def _remove(weights: list[Weight]) -> None:
    for preconditioner in {weight.preconditioner for weight in weights if weight.preconditioner is not None}:
        preconditioner.leave()
    for weight in weights:
        weight.remove()


def refresh(model: nn.Module) -> None:
    """Update `u` and `v` of every PC layer of mode "forward" by `power_iterations` power iterations.

    The preconditioner does this after every optimizer step, and a layer when plain weights are loaded into it. Call it
    after changing weights in another way, or to evaluate a model without one.
    """
    for _, weight in named_weights(model):
        if isinstance(weight.module, PCLinear):
            weight.module.refresh()
            weight.guard("")
