"""PC in other projects' trainers, a module each: `hugging_face`, `lightning`, and TorchTitan's in `torchtitan`."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from pc.preconditioner import Preconditioner
from pc.weight import named_weights


def is_of(preconditioner: Preconditioner | None, model: nn.Module) -> bool:
    """Whether this is the preconditioner of the model's weights, if it has any: a trainer may be given another model."""
    return preconditioner is not None and all(w.preconditioner is preconditioner for _, w in named_weights(model))


def whole_state(preconditioner: Preconditioner) -> dict[str, dict[str, Any]]:
    """The preconditioner's state with whole tensors, which loads on any number of ranks. All ranks call it."""
    return tree_map_only(DTensor, DTensor.full_tensor, preconditioner.state_dict())
