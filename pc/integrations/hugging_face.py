"""PC in Hugging Face's Trainer, with accumulation, clipping, gradient scaling, checkpoints and several processes.

class MyTrainer(PCTrainerMixin, Trainer): ...

trainer = MyTrainer(pc.attach(model, pc.PCConfig()), ...)
trainer.train()
pc.merge(model).save_pretrained(folder)
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from pc.errors import UserError
from pc.factory import precondition
from pc.integrations import is_of, whole_state
from pc.preconditioner import Preconditioner

FILE = "pc.pt"  # the preconditioner's state, in the folder of a checkpoint


class PCTrainerMixin(Trainer):
    """Comes before `transformers.Trainer` among the bases of a trainer, whose model has been given to `pc.attach`."""

    preconditioner: Any = None  # a Preconditioner, once the model is evaluated or trained

    def _started(self) -> Preconditioner:
        model: Any = self.model
        if not is_of(self.preconditioner, model):
            is_replica = dist.is_initialized() and not self.is_fsdp_enabled
            self.preconditioner = precondition(model, process_group=dist.group.WORLD if is_replica else None)
        return self.preconditioner

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Called once model and optimizer are wrapped, before a checkpoint's optimizer state is loaded."""
        chosen: Any = optimizer or self.optimizer
        self._started().follow(chosen)
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:  # the last micro-batch of a step; clipping comes next
            self.preconditioner.pull_back()
        return loss

    def evaluation_loop(self, *args, **kwargs):
        self._started()
        return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        super()._save_checkpoint(model, trial)
        found = whole_state(self.preconditioner)  # of all ranks
        if self.is_world_process_zero():
            torch.save(found, Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}" / FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Called once a checkpoint's model is loaded; by transformers 5.0 in a new run too, with None."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.load_pc(Path(checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        best: Any = self.state.best_model_checkpoint
        self.load_pc(Path(best))

    def load_pc(self, checkpoint: Path) -> None:
        file = checkpoint / FILE
        if not file.exists():
            raise UserError(f"{file} is missing: the model there holds PC(W), and only that file has its W")
        self.preconditioner.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
