"""The training loss."""

import torch
from torchtitan.components.loss import LossFunction, cross_entropy_loss

from pc_recipe.config import Config


def compiles_loss(config: Config, tensor_parallel: int) -> bool:
    """Whether the loss is compiled: not on logits that tensor parallelism shards.

    Torch 2.13 compiles such a loss correctly only the first time. Loaded from the compiler's cache, by this process or a
    later one, the loss is silently wrong.
    """
    return config.compile.enable and "loss" in config.compile.components and tensor_parallel == 1


def build_loss(config: Config, tensor_parallel: int) -> LossFunction:
    """The sum of cross entropies."""
    if compiles_loss(config, tensor_parallel):
        return torch.compile(cross_entropy_loss, backend=config.compile.backend)
    return cross_entropy_loss
