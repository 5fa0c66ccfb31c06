"""PC in Hugging Face's Trainer, with accumulation, clipping, gradient scaling, checkpoints and several processes.

class MyTrainer(PCTrainerMixin, Trainer): ...

trainer = MyTrainer(pc.attach(model, pc.PCConfig()), ...)
trainer.train()
pc.merge(model).save_pretrained(folder)
"""

from typing import Any

import torch
from transformers import Trainer

from pc.errors import UserError
from pc.integrations import has_pc, started
from pc.preconditioner import Preconditioner
from pc.weight import named_weights


class PCTrainerMixin(Trainer):
    """List it before `transformers.Trainer` among a trainer's bases, and give the model to `pc.attach` first."""

    @property
    def preconditioner(self) -> Preconditioner:
        model: Any = self.model
        return started(model, is_replicated=not self.is_fsdp_enabled)

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        """Called before the model is wrapped. A new run creates the optimizer from W and gammas, as a resumed one does, so
        that both have the same parameter groups."""
        if not self.is_fsdp_enabled:
            self.preconditioner.write_if_stale()
        return super().create_optimizer(*args, **kwargs)

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name in super().get_decay_parameter_names(model) if not name.endswith("_gamma")]

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Called once model and optimizer are wrapped, before a checkpoint's optimizer state is loaded."""
        chosen: Any = optimizer or self.optimizer
        preconditioner = self.preconditioner
        preconditioner.note_wrapped()
        preconditioner.follow(chosen)
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:  # the last micro-batch of a step; clipping comes next
            self.preconditioner.pull_back()
        return loss

    def evaluation_loop(self, *args, **kwargs):
        model: Any = self.model
        if has_pc(model):
            self.preconditioner.write_if_stale()
        return super().evaluation_loop(*args, **kwargs)

    def floating_point_ops(self, inputs) -> int:
        """transformers counts six a parameter and token; what PC adds is multiplied by once a step."""
        model: Any = self.model
        counted = super().floating_point_ops(inputs)
        if not counted or not hasattr(model, "num_parameters"):
            return counted
        added = sum(parameter.numel() for _, weight in named_weights(model) for parameter in weight.trained)
        return counted - counted * added // model.num_parameters(exclude_embeddings=True)

    def get_num_trainable_parameters(self) -> int:
        """A weight and its W, once it has one, are one."""
        model: Any = self.model
        weights = [weight for _, weight in named_weights(model) if weight.orig is not None]
        twice = [weight.effective for weight in weights if weight.effective.requires_grad]
        return super().get_num_trainable_parameters() - sum(weight.numel() for weight in twice)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        """Called before the model is wrapped. Loading is not strict, so a checkpoint without W would pass.

        Raises:
            UserError: the checkpoint lacks a weight or its W.
        """
        preconditioner = self.preconditioner
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        _require_loaded(preconditioner, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        _require_loaded(self.preconditioner, self.state.best_model_checkpoint)


def _require_loaded(preconditioner: Preconditioner, checkpoint: Any) -> None:
    try:
        preconditioner.require_loaded()
    except UserError as error:
        raise UserError(
            f"{checkpoint}: {error}; the checkpoint is of a plain model, or transformers saves this model under other names"
        ) from None
