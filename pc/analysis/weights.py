"""Raw and effective weights of the block's linear layers, from a training checkpoint."""

import re
from pathlib import Path

import torch
from torch import Tensor

from pc.common.run_folder import step_of
from pc.config import PCConfig, block_of, matches
from pc.cuts import Cut, Form, form_of
from pc.errors import UserError
from pc.linear import evaluate
from pc.titan.distcp import CheckpointFolder
from pc.titan.fingerprint import method_of, pc_config


class LinearWeights:
    """The linear layers of a checkpoint folder `step-N`, as the trainer writes it.

    Attributes:
        step: optimizer steps done.
        linears: names of the block's linear layers, such as "layers.0.attention.wo", in order of layers.
        fingerprint: the method's settings ("enable", "level", "blocks", "schedule", ...), {} if not recorded.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = CheckpointFolder(folder)
        self._keys = self._folder.shapes().keys()
        self.step = step_of(folder)
        names = [key.removesuffix(".weight") for key in self._keys if re.match(r"layers\.\d+\..*\.weight$", key)]
        self.linears = sorted((name for name in names if block_of(name)), key=lambda n: (int(n.split(".")[1]), n))
        if not self.linears:
            raise UserError(f"{folder}: holds no linear layers of a Llama; is it a checkpoint of this trainer?")
        self.fingerprint = method_of(self._folder)

    def has_pc(self, linear: str) -> bool:
        """Whether the layer's weight is preconditioned."""
        return f"pc.{linear}.u" in self._keys

    @torch.no_grad()
    def read(self, linear: str) -> tuple[Tensor, Tensor]:
        """Raw and effective weight [n, m] of a layer; the same tensor twice without PC."""
        weight, prefix = f"{linear}.weight", f"pc.{linear}."
        if not self.has_pc(linear):
            tensor = self._folder.read_tensors([weight])[weight]
            return tensor, tensor
        if prefix + "raw" in self._keys:  # schedule "step" keeps both
            tensors = self._folder.read_tensors([weight, prefix + "raw"])
            return tensors[prefix + "raw"], tensors[weight]
        names = [key for key in (weight, prefix + "gamma", prefix + "u", prefix + "v") if key in self._keys]
        tensors = self._folder.read_tensors(names)
        raw, vectors = tensors[weight], tensors[prefix + "v"]
        form = self._form(linear, raw.shape, 1 if vectors.ndim == 1 else len(vectors))
        return raw, evaluate(form, *(tensors[name][None] for name in names))[0][0]

    def _form(self, linear: str, shape: torch.Size, matrices: int) -> Form:
        missing = {"level", "blocks", "norm_recovery"} - self.fingerprint.keys()
        if missing:
            raise UserError(f"{self._folder.path}: method.fingerprint lacks {sorted(missing)}, which PC(W) needs")
        config = pc_config(self.fingerprint, PCConfig())
        config = config.for_block(next(entry for entry in config.blocks if matches(entry, linear)))
        return form_of(linear, shape, Cut(), [config], [shape[0] // matrices])
