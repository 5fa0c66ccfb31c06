"""PC for any of TorchTitan's models, as a model converter for the trainer `pc.integrations.torchtitan_train`. In its
TOML:

[job]
custom_config_module = "pc.integrations.torchtitan"  # allows [pc], and registers the converter
[model]
converters = ["pc"]
[pc]
level = 4
"""

import difflib
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

from pc.api import attach
from pc.config import PCConfig
from pc.errors import UserError
from pc.targets import describe

NAME = "pc"


@dataclass
class JobConfig:
    """What TorchTitan adds to its own sections. A dict, so that `Converter` reports wrong keys, without a traceback."""

    pc: dict = field(default_factory=dict)


class Converter:
    """TorchTitan's `ModelConverter`. A mistake in the configuration raises a `UserError`."""

    def __init__(self, job_config: Any, parallel_dims: ParallelDims) -> None:
        values = {**job_config.pc}
        is_enabled = values.pop("enable", True)
        known = [key.name for key in fields(PCConfig)]
        for key in values.keys() - known:
            nearest = difflib.get_close_matches(key, known, n=1) or known
            raise UserError(f"[pc]: unknown key {key}; did you mean {' or '.join(nearest)}?")
        config = PCConfig(**values)
        if job_config.model.converters[-1] != NAME:
            raise UserError(f'model.converters: "{NAME}" must be the last; one after it could replace PC\'s layers')
        if is_enabled and parallel_dims.tp_enabled:
            raise UserError(
                "parallelism.tensor_parallel_degree: TorchTitan shards layers after converting them, with all that PC "
                "has added; use data parallelism"
            )
        self._config = config if is_enabled else None

    def convert(self, model: nn.Module) -> None:
        """Attach PC to the whole model, on the meta device, before TorchTitan splits, wraps and shards it."""
        if self._config is not None:
            logger.info(f"PC:\n{describe(model, self._config)}")
            attach(model, self._config)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: the preconditioner follows the optimizers."""


register_model_converter(Converter, NAME)
