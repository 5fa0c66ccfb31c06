"""PC for any of TorchTitan's models, as a model converter for the trainer `pc.integrations.torchtitan_train`. In its TOML:

[job]
custom_config_module = "pc.integrations.torchtitan"  # allows [pc], and registers the converter
[model]
converters = ["pc"]
[pc]
level = 4
"""

from dataclasses import dataclass, field

from torch import nn
from torchtitan.config import JobConfig as TitanConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

from pc.common.errors import exit_on_user_error
from pc.errors import UserError
from pc.settings.chain import validated
from pc.settings.schema import PC
from pc.titan.cpu import use_cpu_where_there_is_no_gpu
from pc.weights import attach, describe

NAME = "pc"


@dataclass
class JobConfig:
    """What TorchTitan adds to its own sections. A dict, so that wrong keys are found here and not in a traceback."""

    pc: dict = field(default_factory=dict)


class Converter:
    """TorchTitan's `ModelConverter`. A mistake in the configuration ends the process with one line."""

    @exit_on_user_error
    def __init__(self, job_config: TitanConfig, parallel_dims: ParallelDims) -> None:
        settings = validated({"enable": True, "start": "raw", **getattr(job_config, "pc", {})}, PC, "[pc]")
        if (settings.schedule, settings.start) != ("step", "raw"):
            raise UserError('[pc]: here schedule is "step" and start is "raw"')
        if job_config.model.converters[-1] != NAME:
            raise UserError(f'model.converters: "{NAME}" must be the last; one after it could replace PC\'s layers')
        if settings.enable and parallel_dims.tp_enabled:
            raise UserError(
                "parallelism.tensor_parallel_degree: TorchTitan shards layers after converting them, with all that PC "
                "has added; use data parallelism"
            )
        self._config = settings.to_pc_config() if settings.enable else None

    @exit_on_user_error
    def convert(self, model: nn.Module) -> None:
        """Attach PC to the whole model, on the meta device, before TorchTitan splits, wraps and shards it."""
        if self._config is not None:
            logger.info(f"PC:\n{describe(model, self._config)}")
            attach(model, self._config)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: the schedule follows the optimizers."""


exit_on_user_error(use_cpu_where_there_is_no_gpu)()
register_model_converter(Converter, NAME)
