"""`precondition`: checks that models and optimizers can be trained with PC, and makes the preconditioner."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pc.errors import UserError
from pc.followed import joining_gammas, unwrapped
from pc.per_forward import PerForward
from pc.per_step import PerStep
from pc.preconditioner import Preconditioner
from pc.targets import clean_name
from pc.weight import Weight, named_weights


@torch.inference_mode(False)  # in which Lightning evaluates: tensors made there cannot be trained
def precondition(
    models: nn.Module | Iterable[nn.Module],
    *optimizers: Optimizer | Iterable[Optimizer],
    process_group: dist.ProcessGroup | None = None,
) -> Preconditioner:
    """Make the preconditioner of `PCConfig.mode`, for models after `pc.attach`.

    Args:
        models: the model, or a list of its parts on this rank under pipeline parallelism; after sharding, with weights
            off the meta device. Ranks of `DistributedDataParallel`, if that is what you give, share the work.
        optimizers: all that train the model. The preconditioner follows them from now on (`follow`), and the model is
            ready. Without optimizers, call `follow` later, or `restore_raw` and `write_pc` around each step.
        process_group: ranks that have equal weights and gradients, to share the work without DDP.

    A copy of the model alone can be evaluated, but not trained. To train a copy, copy all three together:
    `copy.deepcopy((model, optimizer, preconditioner))`.

    Raises:
        UserError: no weight is marked, or one is on the meta device, is below float32, is shared, or has a
            preconditioner already; the model is in FSDP1; those of `follow`. Model and optimizers are then as before.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    weights = [weight for model in models for _, weight in named_weights(model)]
    if not weights:
        raise UserError("pc.precondition found no weight with PC; call pc.attach(model, pc.PCConfig(...)) first")
    _require_usable(models, weights)
    if optimizers:
        joining_gammas(weights, unwrapped(optimizers))  # raises before anything is changed
    by_name = {weight.name: weight for weight in weights}
    if weights[0].config.mode == "step":
        replicas = [
            m.process_group for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)
        ]
        made: Preconditioner = PerStep(models, by_name, process_group or next(iter(replicas), None))
    else:
        made = PerForward(models, by_name)
    if optimizers:
        made.follow(*optimizers)
        # of a model with loaded PC(W), W comes with the preconditioner's state
        if not any(weight.is_loaded_pc for weight in weights):
            made.write_pc(share=True)
    return made


def _require_usable(models: list[nn.Module], weights: list[Weight]) -> None:
    holders: dict[int, list[str]] = {}
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UserError("FSDP1 makes weights parts of one flat parameter; shard with fully_shard (FSDP2)")
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(clean_name(name))
    first = weights[0]
    for weight in weights:
        if weight.config.mode != first.config.mode:
            raise UserError(
                f'{first.name} has pc.mode "{first.config.mode}", {weight.name} "{weight.config.mode}"; use one for all'
            )
        if weight.parameter.dtype != first.parameter.dtype:
            raise UserError(
                f"{first.name} is {first.parameter.dtype}, {weight.name} {weight.parameter.dtype}; give weights with PC one "
                "dtype, or leave some out of blocks"
            )
        if weight.parameter.is_meta:
            raise UserError(f"{weight.name} is on the meta device; call pc.precondition once the weights exist")
        if weight.parameter.dtype.itemsize < 4:
            raise UserError(
                f"{weight.name} is {weight.parameter.dtype}, but W needs float32 to accumulate small updates; call "
                "model.float(), and use autocast or FSDP's mixed precision for fast matmuls"
            )
        if len(sharing := holders[id(weight.parameter)]) > 1:
            raise UserError(
                f"{weight.name} shares its weight: {', '.join(sharing)}; PC needs a separate one: untie it, or leave it "
                "out of blocks"
            )
        if [other.name for other in weights].count(weight.name) > 1:
            raise UserError(
                f"two modules have PC of the name {weight.name}: give each model its own pc.precondition, and call "
                "pc.attach after what copies modules, as peft does (modules_to_save)"
            )
        if weight.raw is not None:  # also in a copy that was made without its preconditioner
            raise UserError(
                f"{weight.name} has a preconditioner already, which holds its W; use that one. To copy a model: "
                "copy.deepcopy((model, optimizer, preconditioner)). To start again: pc.merge (from PC(W)) or pc.detach "
                "(from W), then pc.attach"
            )
