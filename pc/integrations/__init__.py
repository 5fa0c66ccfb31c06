"""PC in other projects' trainers, a module each: `hugging_face`, `lightning`, and TorchTitan's in `torchtitan`."""

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from pc.preconditioner import Preconditioner


def whole_state(preconditioner: Preconditioner) -> dict[str, dict[str, Any]]:
    """The preconditioner's state with whole tensors, which loads on any number of ranks. All ranks call it."""
    return tree_map_only(DTensor, DTensor.full_tensor, preconditioner.state_dict())
