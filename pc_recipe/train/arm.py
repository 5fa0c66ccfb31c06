"""An arm of a study that no key describes: a class that a run's config names, called around every optimizer step."""

import importlib
import inspect
from typing import Any

from torch import nn

from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.train.optimizers import Optimizers


class Arm:
    """Does nothing; the base of others.

    It is made once, when model and optimizers are, before a checkpoint is loaded: what its constructor makes of the
    weights is what a new run starts with. Between steps a weight with PC is PC(W). A checkpoint stores nothing of an
    arm, so what it does should depend on weights, step number and options alone.

    Args:
        parts: this rank's models, sharded.
        options: `experiment.options`.
    """

    def __init__(self, parts: list[nn.Module], optimizers: Optimizers, config: Config, **options: Any) -> None:
        self.parts, self.optimizers, self.config = parts, optimizers, config

    def before_step(self, step: int) -> None:
        """Gradients are those of W, and clipped; weights are those of the last forward pass."""

    def after_step(self, step: int) -> None:
        """Weights are those of the next forward pass."""


def make_arm(parts: list[nn.Module], optimizers: Optimizers, config: Config) -> Arm:
    """The arm that the config names. Only this key of the user's own config makes a run import other code.

    Raises:
        UserError: there is no such class, or it does not take these options.
    """
    module, _, name = config.experiment.arm.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name) if module else Arm
        inspect.signature(kind).bind(*(given := (parts, optimizers, config)), **config.experiment.options)
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(f"experiment.arm = {config.experiment.arm!r}: {error}") from error
    return kind(*given, **config.experiment.options)
