"""What a checkpoint must be to continue a run: of the same method (its fingerprint), model and optimizer."""

import json
from dataclasses import replace
from typing import Any

import torch

from pc.config import PCConfig
from pc.errors import UserError
from pc.settings.identity import differing_method, method, whole_method
from pc.settings.schema import PC
from pc.titan.checkpoint_folder import CheckpointFolder


def fingerprint(pc: PC) -> dict[str, str]:
    """PC's settings, as the state "method" of every checkpoint, also a baseline's.

    Without it, a baseline config could resume a PC checkpoint, and silently train PC(W) with the optimizer state of W.
    """
    return {"fingerprint": json.dumps(method(pc), sort_keys=True)}


def method_of(folder: CheckpointFolder) -> dict[str, Any]:
    """The settings in a checkpoint's fingerprint ("enable", "level", "blocks", ...); {} if it has none."""
    key = "method.fingerprint"
    return whole_method(json.loads(folder.read_value(key))) if key in folder.shapes() else {}


def pc_config(settings: dict[str, Any], like: PCConfig) -> PCConfig:
    """The PCConfig of a fingerprint; settings that it leaves out (precision) are those of `like`."""
    return replace(like, **{key: value for key, value in settings.items() if key in PCConfig.__dataclass_fields__})


def require_same_run(checkpoint: CheckpointFolder, pc: PC, shapes: dict[str, torch.Size], optimizers: set[str]) -> None:
    """Check that a checkpoint is of the same method, model and optimizer before a resume.

    Args:
        shapes: of the tensors that the model expects.
        optimizers: kinds in use, "adamw" and "muon".

    Raises:
        UserError: names the setting, the tensor or the optimizers that differ.
    """
    saved, ours = method_of(checkpoint), whole_method(method(pc))
    if not saved:
        raise UserError(
            f"{checkpoint.path} has no method fingerprint, so this trainer did not write it "
            "(to start from plain weights: --checkpoint.initial_load_path)"
        )
    there = checkpoint.shapes()
    kinds = {key.split(".")[1] for key in there if key.startswith("lr_scheduler.")}
    compared: dict[str, tuple] = {"optimizer": (" and ".join(sorted(kinds)), " and ".join(sorted(optimizers)))}
    compared |= {name: (there.get(name), shape) for name, shape in shapes.items()}
    different = {f"pc.{key}": (saved.get(key), ours.get(key)) for key in differing_method(saved, ours)}
    different |= {what: pair for what, pair in compared.items() if pair[0] != pair[1]}
    for what, (in_checkpoint, in_config) in different.items():
        raise UserError(
            f"cannot resume {checkpoint.path}: {what} is {in_checkpoint} in the checkpoint, {in_config} in the config; "
            "use the checkpoint's settings, or another job.dump_folder to start a new run"
        )


def require_plain_weights(checkpoint: CheckpointFolder) -> None:
    """Raise a `UserError` for a checkpoint of schedule "forward", whose `weight` is the raw W, not PC(W)."""
    if method_of(checkpoint).get("schedule") == "forward":
        raise UserError(
            f'checkpoint.initial_load_path = {checkpoint.path} holds raw weights, not PC(W) (schedule "forward"); '
            "export it with scripts/export_hf.py and start from the export with checkpoint.initial_load_in_hf = true"
        )
