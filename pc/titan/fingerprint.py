"""PC in a checkpoint: its tensors, and a fingerprint of the settings, which must match on resume."""

import json
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from pc.config import PCConfig
from pc.errors import UserError
from pc.settings.identity import differing_method, method, whole_method
from pc.settings.schema import PC
from pc.titan.distcp import CheckpointFolder


class Fingerprint(Stateful):
    """PC's settings, saved with every checkpoint, also a baseline's.

    Without it, a baseline config could resume a PC checkpoint, and silently train PC(W) with the optimizer state of W.
    """

    KEY = "method"

    def __init__(self, pc: PC) -> None:
        self.value = json.dumps(method(pc), sort_keys=True)

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load: `require` has already compared the fingerprints."""


def pc_config(settings: dict[str, Any], like: PCConfig) -> PCConfig:
    """The PCConfig of a fingerprint; settings that it leaves out (precision) are those of `like`."""
    return replace(like, **{key: value for key, value in settings.items() if key in PCConfig.__dataclass_fields__})


def method_of(folder: CheckpointFolder) -> dict[str, Any]:
    """The settings in a checkpoint's fingerprint ("enable", "level", "blocks", ...); {} if it has none."""
    key = "method.fingerprint"
    return whole_method(json.loads(folder.read_value(key))) if key in folder.shapes() else {}


def require(checkpoint: CheckpointFolder, pc: PC) -> None:
    """Raise a `UserError` that names what differs if the checkpoint's PC settings differ from `pc`."""
    saved, ours = method_of(checkpoint), whole_method(method(pc))
    if not saved:
        raise UserError(
            f"{checkpoint.path} has no method fingerprint, so this trainer did not write it "
            "(to start from plain weights: --checkpoint.initial_load_path)"
        )
    if differing := differing_method(saved, ours):
        what = ", ".join(f"pc.{k}: checkpoint {saved.get(k)!r}, config {ours.get(k)!r}" for k in differing)
        raise UserError(
            f"cannot resume {checkpoint.path}: {what}. Use the checkpoint's settings, or another job.dump_folder "
            "to start a new run"
        )


def require_contents(checkpoint: CheckpointFolder, shapes: dict[str, torch.Size], optimizers: set[str]) -> None:
    """Check that a checkpoint is of the same model and optimizer before a resume.

    Args:
        shapes: of the tensors that the model expects.
        optimizers: kinds in use, "adamw" and "muon".

    Raises:
        UserError: names the tensor or the optimizers that differ.
    """
    saved = checkpoint.shapes()
    kinds = {key.split(".")[1] for key in saved if key.startswith("lr_scheduler.")}
    compared = {"optimizer": (" and ".join(sorted(kinds)), " and ".join(sorted(optimizers)))}
    compared |= {name: (str(saved.get(name)), str(shape)) for name, shape in shapes.items()}
    for what, (there, here) in compared.items():
        if there != here:
            raise UserError(
                f"cannot resume {checkpoint.path}: {what} is {there} in the checkpoint, {here} in the config"
            )


def require_plain_weights(checkpoint: CheckpointFolder) -> None:
    """Raise a `UserError` for a checkpoint of schedule "forward", whose `weight` is the raw W, not PC(W)."""
    if method_of(checkpoint).get("schedule") == "forward":
        raise UserError(
            f'checkpoint.initial_load_path = {checkpoint.path} holds raw weights, not PC(W) (schedule "forward"); '
            "export it with scripts/export_hf.py and start from the export with checkpoint.initial_load_in_hf = true"
        )
