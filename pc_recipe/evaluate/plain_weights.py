"""A checkpoint of a run as the weights of a plain Llama: PC evaluated, every tensor accounted for."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.llama3.model.model import Transformer

from pc import attach, named_weights
from pc_recipe.checkpoints import fingerprint
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.checkpoints.hf_folder import require_shapes
from pc_recipe.config import Config
from pc_recipe.config.inheritance import validated
from pc_recipe.config.pc_section import PC
from pc_recipe.files import record
from pc_recipe.files.places import CONFIG, run_of
from pc_recipe.files.run_folder import find_newest_checkpoint
from pc_recipe.train.llama2 import Llama2Args, model_args_of

# Entries of a resumable checkpoint besides the model.
_OTHER_STATES = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "method.")


@dataclass(frozen=True)
class RunCheckpoint:
    """One step of a run, ready to be used without PC."""

    folder: CheckpointFolder
    config: dict[str, Any]
    """The run's resolved config.toml."""
    settings: Config
    """Its settings of model and method, and the sequence length."""
    method: PC
    """The checkpoint's fingerprint: enable, level, blocks, ...; of weights alone, which have none, config.toml's [pc]."""
    model_args: Llama2Args
    weights: dict[str, Tensor]
    """{TorchTitan's name: effective weight}, on the CPU, in the saved dtype."""

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return run_of(self.path)

    @property
    def step(self) -> int:
        return self.folder.step


def load(path: Path) -> RunCheckpoint:
    """Read RUN/checkpoint/step-N with its config, RUN/config.toml; for RUN, the newest complete one.

    Raises:
        UserError: no checkpoint, an incomplete one, or any extra, missing or misshapen tensor.
    """
    if newest := find_newest_checkpoint(path):
        print(f"{path}: its newest checkpoint is {newest.name}", file=sys.stderr)
    folder = CheckpointFolder(newest or path)
    config, settings = _read_run_config(folder.path)
    args = model_args_of(settings)
    with torch.device("meta"):
        model = Transformer(args)
    plain = {key: tensor.shape for key, tensor in model.state_dict().items()}
    shapes = folder.shapes()
    saved = fingerprint.read_pc_settings(folder)
    if saved and saved.enable:
        attach(model, saved.pc_config)
    pc_shapes = _pc_shapes(model)
    saved_shapes = {key: shape for key, shape in shapes.items() if not key.startswith(_OTHER_STATES)}
    require_shapes(plain | pc_shapes, saved_shapes, folder.path, " of config.toml")
    return RunCheckpoint(folder, config, settings, saved or settings.pc, args, folder.read_tensors([*plain]))


def _read_run_config(checkpoint: Path) -> tuple[dict[str, Any], Config]:
    """config.toml, and those of its keys that say what the weights are; others may be of an older version."""
    path = run_of(checkpoint) / CONFIG
    config = record.read(path, record.Tables) or {}
    read: dict[str, Any] = {name: config[name] for name in ("model", "training", "pc") if name in config}
    if isinstance(training := read.get("training"), dict):
        read["training"] = {key: value for key, value in training.items() if key == "seq_len"}
    return config, validated(read, Config, str(path), extra="ignore")


def _pc_shapes(model: Transformer) -> dict[str, torch.Size]:
    """Shapes of what PC adds to the weights of `model`."""
    shapes: dict[str, torch.Size] = {}
    for name, weight in named_weights(model):
        split = weight.split
        gammas = [math.prod(split.gamma_shape)]
        added = {"orig": weight.effective.shape, "gamma": gammas, "u": split.u_shape, "v": split.v_shape}
        if not weight.config.learnable_gamma:
            del added["gamma"]
        shapes |= {f"{name}.weight_{key}": torch.Size(shape) for key, shape in added.items()}
    return shapes
