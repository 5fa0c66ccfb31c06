"""PC in other projects' trainers, one module each: `hugging_face`, `lightning`; two for TorchTitan."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from pc.api import precondition
from pc.preconditioner import Preconditioner, preconditioners_of
from pc.targets import clean_name
from pc.weight import added_names, named_weights


def has_pc(model: nn.Module) -> bool:
    """Whether any weight is marked; false after `pc.merge`."""
    return any(True for _ in named_weights(model))


def started(model: nn.Module, is_replicated: bool) -> Preconditioner:
    """The model's preconditioner, made now if it has none, for trainers that load a checkpoint or evaluate before they wrap
    the model. Once it is wrapped, call its `note_wrapped`.

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


def give_plain(adapter: Any, models: Sequence[nn.Module]) -> None:
    """Give an adapter of TorchTitan, which knows the names of a plain model alone, states without what PC has added, so that
    it saves PC(W) for Hugging Face. None: nothing is saved so."""
    if adapter is not None:
        to_hf, added = adapter.to_hf, {clean_name(name) for model in models for name in added_names(model)}
        adapter.to_hf = lambda state: to_hf({name: state[name] for name in state if clean_name(name) not in added})
