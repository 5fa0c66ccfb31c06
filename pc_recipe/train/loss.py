"""The training loss."""

import torch
from torchtitan.components.loss import LossFunction, cross_entropy_loss

from pc_recipe.config import Config


def build_loss(config: Config) -> LossFunction:
    """The sum of cross entropies."""
    if config.compiles_loss:
        return torch.compile(cross_entropy_loss, backend=config.compile.backend)
    return cross_entropy_loss
