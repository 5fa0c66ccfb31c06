"""What a checkpoint must be to continue a run: of the same method (its fingerprint), model and optimizer."""

import torch

from pc.errors import UserError
from pc_recipe.config.pc_section import PC
from pc_recipe.config.run_key import differing_keys, method_key
from pc_recipe.train.checkpoint_folder import CheckpointFolder


def fingerprint(pc: PC) -> dict[str, str]:
    """PC's settings, as the state "method" of every checkpoint, also a baseline's.

    Without it, a baseline config could resume a PC checkpoint, and silently train PC(W) with the optimizer state of W.
    """
    return {"fingerprint": pc.model_dump_json()}


def read_pc_settings(folder: CheckpointFolder) -> PC | None:
    """The settings in a checkpoint's fingerprint; those that it leaves out are the defaults. None if it has none."""
    key = "method.fingerprint"
    values = folder.read_value(key) if key in folder.shapes() else None
    return values and PC.model_validate_json(values, extra="ignore")


def require_same_run(checkpoint: CheckpointFolder, pc: PC, shapes: dict[str, torch.Size], optimizers: set[str]) -> None:
    """Check that a checkpoint is of the same method, model and optimizer before a resume.

    Args:
        shapes: of the tensors that the model expects.
        optimizers: kinds in use, "adamw" and "muon".

    Raises:
        UserError: names the setting, the tensor or the optimizers that differ.
    """
    saved = read_pc_settings(checkpoint)
    if saved is None:
        raise UserError(
            f"{checkpoint.path} has no method fingerprint, so this trainer did not write it "
            "(to start from plain weights: --checkpoint.initial_load_path)"
        )
    saved_shapes = checkpoint.shapes()
    kinds = {key.split(".")[1] for key in saved_shapes if key.startswith("lr_scheduler.")}
    compared: dict[str, tuple] = {"optimizer": (" and ".join(sorted(kinds)), " and ".join(sorted(optimizers)))}
    compared |= {name: (saved_shapes.get(name), shape) for name, shape in shapes.items()}
    different = {
        f"pc.{key}": (getattr(saved, key), getattr(pc, key))
        for key in differing_keys(method_key(saved), method_key(pc))
    }
    different |= {what: pair for what, pair in compared.items() if pair[0] != pair[1]}
    for what, (in_checkpoint, in_config) in different.items():
        raise UserError(
            f"cannot resume {checkpoint.path}: {what} is {in_checkpoint} in the checkpoint, {in_config} in the config; "
            "use the checkpoint's settings, or another job.dump_folder to start a new run"
        )


def require_plain_weights(checkpoint: CheckpointFolder) -> None:
    """Raise a `UserError` for a checkpoint of mode "forward", whose `weight` is the raw W, not PC(W)."""
    saved = read_pc_settings(checkpoint)
    if saved is not None and saved.enable and saved.mode == "forward":
        raise UserError(
            f'checkpoint.initial_load_path = {checkpoint.path} holds raw weights, not PC(W) (mode "forward"); '
            "export it with scripts/export_hf.py and start from the export with checkpoint.initial_load_in_hf = true"
        )
