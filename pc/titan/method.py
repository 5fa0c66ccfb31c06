"""What a checkpoint says of the method: PC's own tensors, and a fingerprint that a resume must agree with."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from pc.errors import UserError
from pc.linear import named_pc_linears
from pc.titan.config import PC
from pc.titan.distcp import CheckpointFolder


class Fingerprint(Stateful):
    """PC on or off, and if on, what it does: saved with every checkpoint, a baseline's too.

    Without it a plain config would train on, in silence, from effective weights with the raw weights' moments.
    """

    KEY = "method"

    def __init__(self, pc: PC) -> None:
        self.value = fingerprint(pc)

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take over: `require` has compared it before anything was loaded."""


def fingerprint(pc: PC) -> str:
    """JSON of the settings without which a checkpoint means something else."""
    if not pc.enable:
        return json.dumps({"enable": False})
    settings = asdict(pc)
    # How often and how exactly the norm is estimated may change between resumes; what PC(W) is may not.
    for key in ("power_iterations", "compute_dtype"):
        del settings[key]
    return json.dumps(settings, sort_keys=True)


def read_fingerprint(checkpoint: str | Path) -> str:
    """The fingerprint of a checkpoint folder.

    Raises:
        UserError: the checkpoint has none, or is not whole.
    """
    folder = CheckpointFolder(checkpoint)
    if "method.fingerprint" not in folder.shapes():
        raise UserError(
            f"{checkpoint} has no method fingerprint; it is no checkpoint of this trainer "
            "(to start from plain weights: --checkpoint.initial_load_path)"
        )
    return folder.read_value("method.fingerprint")


def require(checkpoint: str | Path, pc: PC) -> None:
    """Refuse to resume from a checkpoint of another method.

    Raises:
        UserError: naming what differs, with both values.
    """
    saved, ours = json.loads(read_fingerprint(checkpoint)), json.loads(fingerprint(pc))
    differing = [key for key in sorted(saved.keys() | ours.keys()) if saved.get(key) != ours.get(key)]
    if saved.get("enable") != ours.get("enable"):
        differing = ["enable"]
    if differing:
        what = ", ".join(f"pc.{k}: checkpoint {saved.get(k)!r}, config {ours.get(k)!r}" for k in differing)
        raise UserError(
            f"cannot resume {checkpoint}: {what}. Use the checkpoint's settings, or another job.dump_folder "
            "for a run from the start"
        )


class ForwardState(Stateful):
    """gamma, u and v of schedule "forward", under the names that schedule "step" uses."""

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self._model_parts = model_parts

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        state = {}
        for model in self._model_parts:
            for name, layer in named_pc_linears(model):
                gamma = {} if layer.gamma is None else {"gamma": layer.gamma.detach()}
                state[name] = {**gamma, "u": layer.u, "v": layer.v}
        return state

    def load_state_dict(self, state_dict: dict[str, dict[str, Tensor]]) -> None:
        """Nothing to do: the tensors of `state_dict` are loaded in place."""
