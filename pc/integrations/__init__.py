"""PC in other projects' trainers, one module each: `hugging_face`, `lightning`; two for TorchTitan."""

import torch.distributed as dist
from torch import nn

from pc.api import precondition
from pc.errors import UserError
from pc.preconditioner import Preconditioner, preconditioners_of
from pc.weight import added_names, named_weights


def has_pc(model: nn.Module) -> bool:
    """Whether any weight is marked; false after `pc.merge`."""
    return any(True for _ in named_weights(model))


def started(model: nn.Module, is_replicated: bool) -> Preconditioner:
    """The model's preconditioner, made now if it has none, for trainers that load a checkpoint or evaluate before they wrap
    the model. Once it is wrapped, call `note_wrapped`.

    Args:
        is_replicated: whether DDP will wrap the model; it gives all ranks the weights of the first.
    """
    if made := preconditioners_of(model):
        return made[0]
    group = dist.group.WORLD if is_replicated and dist.is_initialized() else None
    for _, weight in named_weights(model) if group else ():
        dist.broadcast(weight.effective.detach(), 0)
    preconditioner = precondition(model, process_group=group)
    model._ddp_params_and_buffers_to_ignore = added_names(model)  # type: ignore[assignment]  # no forward pass uses them
    return preconditioner


def note_wrapped(preconditioner: Preconditioner) -> None:
    """Call it on every rank once a trainer has wrapped the model and loaded what it loads: DDP has broadcast all weights,
    which changes no values.

    Raises:
        UserError: a weight is not PC(W) of its W.
    """
    if not preconditioner.holds_pc():
        raise UserError(
            "weights with PC were changed after PC had started, and their W was not, so that the change would be lost: load "
            "plain weights before, as in the module's __init__ or before the trainer is made"
        )
    preconditioner.note_loaded()
