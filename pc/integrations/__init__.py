"""PC in other projects' trainers, a module each: `hugging_face`, `lightning`, and TorchTitan's in `torchtitan`."""

from typing import Any

from torch import Tensor

from pc.preconditioner import Preconditioner


def whole_state(preconditioner: Preconditioner) -> dict[str, dict[str, Any]]:
    """The preconditioner's state with whole tensors, which loads on any number of ranks. All ranks call it."""

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, Tensor) and hasattr(value, "full_tensor") else value

    state = preconditioner.state_dict()
    return {name: {key: whole(value) for key, value in values.items()} for name, values in state.items()}
