"""PC for TorchTitan's own trainer and any of its models, as a model converter. In the TOML of `torchtitan.train`:

    [job]
    custom_config_module = "pc.titan.converter"  # allows [pc], and registers the converter
    [model]
    converters = ["pc"]
    [pc]
    level = 4

PC(W) is computed in every forward pass, because TorchTitan's trainer calls nothing between the last backward pass and
clipping, where schedule "step" changes the gradients. `pc.titan.any_model` is its trainer with that call.
"""

from dataclasses import dataclass, field
from types import MethodType

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
from pc.weights import attach, describe, refresh

NAME = "pc"


@dataclass
class JobConfig:
    """What TorchTitan adds to its own sections. A dict, so that wrong keys are found here and not in a traceback."""

    pc: dict = field(default_factory=dict)


class Converter:
    """TorchTitan's `ModelConverter`. A mistake in the configuration ends the process with one line."""

    schedule = "forward"

    @exit_on_user_error
    def __init__(self, job_config: TitanConfig, parallel_dims: ParallelDims) -> None:
        own = {"enable": True, "schedule": self.schedule, "start": "raw"}
        settings = validated({**own, **getattr(job_config, "pc", {})}, PC, "[pc]")
        if (settings.schedule, settings.start) != (self.schedule, "raw"):
            raise UserError(
                '[pc]: schedule is "forward" in torchtitan.train and "step" in pc.titan.any_model; start is "raw"'
            )
        if job_config.model.converters[-1] != NAME:
            raise UserError(f'model.converters: "{NAME}" must be the last; one after it could replace PC\'s layers')
        if settings.enable and parallel_dims.tp_enabled:
            raise UserError(
                "parallelism.tensor_parallel_degree: TorchTitan shards layers after converting them, with all that PC "
                "has added; use data parallelism"
            )
        if settings.enable and self.schedule == "forward" and job_config.checkpoint.last_save_in_hf:
            raise UserError("checkpoint.last_save_in_hf would save W, not PC(W); use python -m pc.titan.any_model")
        self._config = settings.to_pc_config() if settings.enable else None

    @exit_on_user_error
    def convert(self, model: nn.Module) -> None:
        """Attach PC to the whole model, on the meta device, before TorchTitan splits, wraps and shards it."""
        if self._config is None:
            return
        logger.info(f"PC, schedule {self.schedule}:\n{describe(model, self._config)}")
        attach(model, self._config)
        if self.schedule == "forward":
            # a method, so that the copies that TorchTitan makes for pipeline stages have their own
            model.init_weights = MethodType(_init_weights, model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """After every optimizer step: ten power iterations from the previous vectors."""
        if self._config is not None and self.schedule == "forward":
            for part in [model] if isinstance(model, nn.Module) else model:
                refresh(part)


def _init_weights(model: nn.Module, *args, **kwargs) -> None:
    """The model's own, then gamma, u and v, which it does not know and which `to_empty` left undefined."""
    type(model).init_weights(model, *args, **kwargs)
    refresh(model)


exit_on_user_error(use_cpu_where_there_is_no_gpu)()
register_model_converter(Converter, NAME)
