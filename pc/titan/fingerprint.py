"""What a checkpoint says of the method: PC's own tensors, and a fingerprint that a resume must agree with."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from pc.config import BLOCK_GROUPS, PCConfig
from pc.errors import UserError
from pc.linear import named_pc_linears
from pc.polynomial import resolve
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
    for key in ("power_iterations", "compute_dtype", "start"):
        del settings[key]
    return json.dumps(settings, sort_keys=True)


def pc_config(settings: dict[str, Any], like: PCConfig) -> PCConfig:
    """What a fingerprint says, and for what it leaves out (precision), what `like` does."""
    return replace(like, **{key: value for key, value in settings.items() if key in PCConfig.__dataclass_fields__})


def read_fingerprint(checkpoint: str | Path) -> str:
    """The fingerprint of a checkpoint folder whose checksums the caller has compared.

    Raises:
        UserError: the checkpoint has none, or is not whole.
    """
    folder = CheckpointFolder(checkpoint, verified=True)
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
    if saved.get("enable") != ours.get("enable"):
        differing = ["enable"]
    else:
        one, other = _canonical(saved), _canonical(ours)
        differing = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
    if differing:
        what = ", ".join(f"pc.{k}: checkpoint {saved.get(k)!r}, config {ours.get(k)!r}" for k in differing)
        raise UserError(
            f"cannot resume {checkpoint}: {what}. Use the checkpoint's settings, or another job.dump_folder "
            "for a run from the start"
        )


def require_contents(checkpoint: str | Path, shapes: dict[str, torch.Size], optimizers: set[str]) -> None:
    """Refuse to resume another model or optimizer.

    Args:
        shapes: of the tensors that the model expects.
        optimizers: kinds in use, "adamw" and "muon".

    Raises:
        UserError: naming a tensor or the kinds, with both values.
    """
    saved = CheckpointFolder(checkpoint).shapes()
    for name, shape in shapes.items():
        if saved.get(name) != shape:
            found = tuple(saved[name]) if saved.get(name) is not None else "missing"
            raise UserError(
                f"cannot resume {checkpoint}: {name} is {found} in the checkpoint and {tuple(shape)} in the config's model"
            )
    kinds = {key.split(".")[1] for key in saved if key.startswith("lr_scheduler.")}
    if not optimizers <= kinds:
        raise UserError(
            f"cannot resume {checkpoint}: optimizer {' and '.join(sorted(kinds))} in the checkpoint, "
            f"{' and '.join(sorted(optimizers))} in the config"
        )


def require_plain_weights(checkpoint: str | Path) -> None:
    """Refuse to start from a checkpoint whose `weight` is not what its model multiplied by. Its checksums are right.

    Raises:
        UserError: PC in schedule "forward", where `weight` is the raw W.
    """
    folder = CheckpointFolder(checkpoint, verified=True)
    if "method.fingerprint" not in folder.shapes():
        return
    if json.loads(folder.read_value("method.fingerprint")).get("schedule") == "forward":
        raise UserError(
            f'checkpoint.initial_load_path = {checkpoint} holds raw weights and PC beside them (schedule "forward"); '
            "export it with scripts/export_hf.py and start from that with checkpoint.initial_load_in_hf = true"
        )


def _canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which equal methods are equal: a level for each single block, whatever groups and order were named."""
    if not settings["enable"]:
        return settings
    level, blocks = settings["level"], settings["blocks"]
    levels = level if isinstance(level, dict) else dict.fromkeys(blocks, level)
    # A map given by its coefficients, as a list, is the same as a level's name.
    levels = {entry: resolve(level) for entry, level in levels.items()}
    single = {block: levels[entry] for entry in blocks for block in BLOCK_GROUPS.get(entry, (entry,))}
    # One level for all stays one, so that other blocks alone are not another level too.
    distinct = set(single.values())
    return {**settings, "blocks": sorted(single), "level": single if len(distinct) > 1 else distinct.pop()}


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
