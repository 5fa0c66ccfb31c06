"""PC in TorchTitan 0.3.0, for any of its models (0.2.2: `pc.integrations.torchtitan`). In a module of your own, two lines:

from pc.integrations.torchtitan_03 import with_pc
def llama3_8b_pc(): return with_pc(llama3_8b(), pc.PCConfig(level=4))

where `llama3_8b` is one of TorchTitan's configs; then `torchrun ... -m torchtitan.train --module MODULE --config llama3_8b_pc`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import torchtitan.trainer
import tyro
from torch import Tensor, nn
from torchtitan.components.checkpointer.base import MODEL, ModelWrapper
from torchtitan.tools.logging import logger

from pc.api import attach, precondition
from pc.config import PCConfig
from pc.errors import UserError
from pc.integrations import give_plain, has_pc
from pc.preconditioner import Preconditioner
from pc.targets import describe


def with_pc(config: torchtitan.trainer.Trainer.Config, pc: PCConfig) -> "Trainer.Config":
    """The same run with PC.

    Raises:
        UserError: it is the config of another trainer than TorchTitan's own.
    """
    if type(config) is not torchtitan.trainer.Trainer.Config:
        raise UserError(
            f"with_pc takes a torchtitan.trainer.Trainer.Config, not a {type(config).__module__}.{type(config).__qualname__}; "
            "another trainer needs the calls of pc.integrations.torchtitan_03.Trainer"
        )
    return Trainer.Config(**{key.name: getattr(config, key.name) for key in fields(config)}, pc=pc)


class Trainer(torchtitan.trainer.Trainer):
    """Attaches PC before the model is parallelised, and pulls gradients back after the last micro-batch, before clipping.

    Attributes:
        preconditioner: None if this pipeline stage has no weight with PC, and while plain weights are still to be loaded,
            which become W.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):
        pc: Annotated[PCConfig, tyro.conf.Suppress] = field(default_factory=PCConfig)
        """Which weights get PC, and how. Set in Python, not on the command line."""

    def __init__(self, config: Config) -> None:
        spec: Any = config.model_spec
        parallelize, split = spec.parallelize_fn, spec.pipelining_fn
        hooked = replace(
            spec,
            parallelize_fn=_attaching(config.pc, parallelize),
            pipelining_fn=split and _attaching(config.pc, split, parallelize_fn=parallelize),  # the whole model, once
        )
        super().__init__(replace(config, model_spec=hooked))  # type: ignore[call-arg]
        self.preconditioner = None if self._will_load_plain_weights() else self._start()

    def _will_load_plain_weights(self) -> bool:
        settings = self.config.checkpoint
        if not settings.enable:
            return False
        step = self.checkpointer._find_load_step() if settings.load_step == -1 else settings.load_step
        if step == -1:
            return settings.initial_load_in_hf or bool(settings.initial_load_path and settings.initial_load_model_only)
        return step == 0  # a seed checkpoint, made without PC

    def _start(self) -> Preconditioner | None:
        if not any(map(has_pc, self.model_parts)):
            return None
        preconditioner = precondition(self.model_parts)
        preconditioner.follow(self.optimizers.optimizers)
        if self.config.checkpoint.enable:
            self.checkpointer.states[MODEL] = ModelWrapper(self.model_parts)  # the first one listed the state without W
            give_plain(self.checkpointer.sd_adapter, self.model_parts)
        return preconditioner

    def train_step(self, data_iterator: Any) -> None:
        self.preconditioner = self.preconditioner or self._start()
        self._micro_batches_left = self.gradient_accumulation_steps
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        loss = super().forward_backward_step(**batch)
        self._micro_batches_left -= 1
        if not self._micro_batches_left and self.preconditioner is not None:
            self.preconditioner.pull_back(set_to_none=self.config.training.disable_cuda_graphs)
        return loss


def _attaching(config: PCConfig, function: Callable, **changed: Any) -> Callable:
    """`function`, called with a model that PC is attached to, and with other arguments in place of some."""

    def with_attached(model: nn.Module, **given: Any) -> Any:
        logger.info(f"PC:\n{describe(model, config)}")
        return function(attach(model, config), **given | changed)

    return with_attached
