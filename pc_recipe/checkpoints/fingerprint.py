"""What a checkpoint must be to continue a run: of the same method (its fingerprint), model and optimizer."""

import json
from typing import cast

import torch

from pc.errors import UserError
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.checkpoints.values import FINGERPRINT, Fingerprint
from pc_recipe.config.model_sizes import Model, sizes_of
from pc_recipe.config.pc_section import PC
from pc_recipe.config.run_key import differing_keys, method_key


def fingerprint(pc: PC, model: Model, tokenizer: dict[str, str]) -> dict[str, str]:
    """PC's settings, the model's sizes, and the tokenizer's name and checksum, as the state "method" of every checkpoint,
    also a baseline's.

    Without it, a baseline config could resume a PC checkpoint, and silently train PC(W) with the optimizer state of W.
    """
    return {"fingerprint": json.dumps(pc.model_dump(mode="json") | {"model": sizes_of(model), "tokenizer": tokenizer})}


def read_pc_settings(folder: CheckpointFolder) -> PC | None:
    """The settings in a checkpoint's fingerprint; those that it leaves out are the defaults. None without a fingerprint."""
    saved = _read(folder)
    return saved.pc if saved else None


def read_tokenizer(folder: CheckpointFolder) -> dict[str, str] | None:
    """Name and checksum of the tokenizer in a checkpoint's fingerprint; None in those of older versions."""
    saved = _read(folder)
    return cast(dict[str, str], saved.tokenizer) if saved and saved.tokenizer else None


def _read(folder: CheckpointFolder) -> Fingerprint | None:
    return Fingerprint.of(folder.read_value(FINGERPRINT)) if FINGERPRINT in folder.shapes() else None


def require_same_run(checkpoint: CheckpointFolder, pc: PC, optimizers: set[str]) -> None:
    """Check that a checkpoint is of the same method and optimizer before a resume.

    Args:
        optimizers: kinds in use, in lower case.

    Raises:
        UserError: names the setting or the optimizers that differ.
    """
    saved = read_pc_settings(checkpoint)
    if saved is None:
        raise UserError(
            f"{checkpoint.path} holds weights alone, or another trainer wrote it "
            "(to start from plain weights: --checkpoint.initial_load_path)"
        )
    different = {
        f"pc.{key}": (getattr(saved, key), getattr(pc, key))
        for key in differing_keys(method_key(saved), method_key(pc))
    }
    kinds = {key.split(".")[1] for key in checkpoint.shapes() if key.startswith("lr_scheduler.")}
    if kinds != optimizers:
        different["optimizer"] = " and ".join(sorted(kinds)), " and ".join(sorted(optimizers))
    _require_none(different, checkpoint)


def require_same_model(checkpoint: CheckpointFolder, model: Model, shapes: dict[str, torch.Size]) -> None:
    """Check that a checkpoint's model is the config's; older checkpoints name few sizes, so their tensors' shapes count too.

    Args:
        shapes: of the tensors that the model expects.

    Raises:
        UserError: names the size or the tensor that differs.
    """
    fingerprint = _read(checkpoint)
    saved = fingerprint.model if fingerprint else {}
    compared: dict[str, tuple] = {f"model.{key}": (saved.get(key, size), size) for key, size in sizes_of(model).items()}
    compared |= {name: (checkpoint.shapes().get(name), shape) for name, shape in shapes.items()}
    _require_none({what: pair for what, pair in compared.items() if pair[0] != pair[1]}, checkpoint)


def _require_none(different: dict[str, tuple], checkpoint: CheckpointFolder) -> None:
    for what, (in_checkpoint, in_config) in different.items():
        raise UserError(
            f"cannot load {checkpoint.path}: {what} is {in_checkpoint} in the checkpoint, {in_config} in the config; "
            "use the checkpoint's settings, or another job.dump_folder to start a new run"
        )
