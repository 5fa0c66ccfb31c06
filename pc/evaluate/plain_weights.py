"""A checkpoint of a run as the weights of a plain Llama: PC evaluated, every tensor accounted for."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.job_config import Training
from torchtitan.models.llama3.model.model import Transformer

from pc import attach, effective_weight, named_pc_linears
from pc.common.run_folder import INDEX, step_of
from pc.errors import UserError
from pc.titan import fingerprint
from pc.titan.config import PC, JobConfig, Model
from pc.titan.distcp import CheckpointFolder
from pc.titan.llama2 import Llama2Args, model_args
from pc.titan.toml import require_typed

# What a resumable checkpoint holds besides the model.
_OTHER_STATES = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "method.")


@dataclass(frozen=True)
class RunCheckpoint:
    """One step of a run, ready to be used without PC."""

    path: Path
    config: dict[str, Any]
    """The run's resolved config.toml."""
    method: dict[str, Any]
    """The checkpoint's fingerprint: enable, level, blocks, schedule, ..."""
    model_args: Llama2Args
    weights: dict[str, Tensor]
    """TorchTitan's names to effective weights, on the CPU, in the dtype they were saved in."""

    @property
    def step(self) -> int:
        return step_of(self.path)


def is_checkpoint(path: str | Path) -> bool:
    return (Path(path) / INDEX).is_file()


def load(path: str | Path) -> RunCheckpoint:
    """Read RUN/checkpoint/step-N with the config beside it, RUN/config.toml.

    Raises:
        UserError: no checkpoint, half of one, or any tensor too many, missing or of another shape.
    """
    folder = CheckpointFolder(path)
    config = _run_config(folder.path)
    model_args = model_args_of(config)
    with torch.device("meta"):
        model = Transformer(model_args)
    plain = {key: tensor.shape for key, tensor in model.state_dict().items()}
    shapes = folder.shapes()
    method = json.loads(folder.read_value("method.fingerprint")) if "method.fingerprint" in shapes else {}
    pc_section = PC(**config.get("pc", {}))
    pc_config = fingerprint.pc_config(method, pc_section.to_pc_config()) if method.get("enable") else None
    forward = pc_config is not None and pc_config.schedule == "forward"
    if not method and pc_section.enable and pc_section.schedule == "forward":
        raise UserError(f"{path}: holds raw weights without gamma, u and v; take a checkpoint that can be resumed")

    if pc_config is not None:
        attach(model, pc_config)
    pc_shapes = _pc_shapes(model)
    _require_equal(plain | pc_shapes, _model_entries(shapes), folder.path)
    wanted = [*plain, *(key for key in pc_shapes if forward)]
    tensors = folder.read_tensors(wanted)
    if forward:
        _evaluate_pc(model, tensors)
    weights = {key: tensors[key] for key in plain}
    return RunCheckpoint(folder.path, config, method, model_args, weights)


def model_args_of(config: dict[str, Any]) -> Llama2Args:
    """The model that a resolved config describes."""
    model, training = Model(**config.get("model", {})), config.get("training", {})
    return model_args(model.flavor, model.vocab_size, training.get("seq_len", Training().seq_len))


def _run_config(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint.parent.parent / "config.toml"
    if not path.is_file():
        raise UserError(f"{path}: missing; a checkpoint is read together with its run's config.toml")
    try:
        config = tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not the configuration of a run ({str(error).splitlines()[0]})") from None
    used = {key: config[key] for key in ("model", "training", "data", "pc") if key in config}
    if isinstance(used.get("training"), dict):  # of an older version's other keys nothing is asked
        used["training"] = {key: value for key, value in used["training"].items() if key == "seq_len"}
    require_typed(used, JobConfig, str(path))
    return config


def _pc_shapes(model: Transformer) -> dict[str, torch.Size]:
    """Shapes of the entries `pc.*` that belong to the PC layers of `model`."""
    shapes = {}
    for name, layer in named_pc_linears(model):
        rows, columns = layer.weight.shape
        shapes[f"pc.{name}.u"] = torch.Size([rows])
        shapes[f"pc.{name}.v"] = torch.Size([columns])
        if layer.pc_config.learnable_gamma:
            shapes[f"pc.{name}.gamma"] = torch.Size([1])
        if layer.pc_config.schedule == "step":
            shapes[f"pc.{name}.raw"] = layer.weight.shape
    return shapes


def _model_entries(shapes: dict[str, torch.Size | None]) -> dict[str, torch.Size | None]:
    return {key: shape for key, shape in shapes.items() if not key.startswith(_OTHER_STATES)}


def _require_equal(expected: dict[str, torch.Size], found: dict[str, torch.Size | None], path: Path) -> None:
    for key in sorted(expected.keys() | found.keys()):
        if key not in found:
            raise UserError(f"{path}: tensor {key} is missing")
        if key not in expected:
            raise UserError(f"{path}: tensor {key} does not belong to the model of config.toml")
        if found[key] != expected[key]:
            shape = None if found[key] is None else list(found[key])
            raise UserError(f"{path}: tensor {key} has shape {shape}, the model of config.toml {list(expected[key])}")


def _evaluate_pc(model: Transformer, tensors: dict[str, Tensor]) -> None:
    """Schedule "forward" saves the raw W as `weight`; put PC(W) in its place."""
    for name, layer in named_pc_linears(model):
        tensors[f"{name}.weight"] = effective_weight(
            tensors[f"{name}.weight"],
            tensors.get(f"pc.{name}.gamma"),
            tensors[f"pc.{name}.u"],
            tensors[f"pc.{name}.v"],
            layer.pc_config,
        )
