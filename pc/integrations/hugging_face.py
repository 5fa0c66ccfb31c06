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
from transformers import TrainerCallback

from pc.errors import UserError
from pc.factory import precondition
from pc.integrations import whole_state
from pc.preconditioner import Preconditioner

FILE = "pc.pt"  # the preconditioner's state, in the folder of a checkpoint


class _Saved(TrainerCallback):
    def __init__(self, trainer: "PCTrainerMixin") -> None:
        self.trainer = trainer

    def on_save(self, args, state, control, **kwargs) -> None:
        found = whole_state(self.trainer.preconditioner)  # of all ranks
        if state.is_world_process_zero:
            torch.save(found, Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step:  # resumed: the model's weights are loaded
            self.trainer.load_pc(Path(args.output_dir) / f"checkpoint-{state.global_step}")


class PCTrainerMixin:
    """Comes before `transformers.Trainer` among the bases of a trainer, whose model has been given to `pc.attach`."""

    preconditioner: Any = None
    """a Preconditioner, once the model is evaluated or trained"""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_Saved(self))

    def _started(self) -> Preconditioner:
        if self.preconditioner is None:
            is_replica = dist.is_initialized() and not self.is_fsdp_enabled
            self.preconditioner = precondition(self.model, process_group=dist.group.WORLD if is_replica else None)
        return self.preconditioner

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Called once model and optimizer are wrapped, before a checkpoint's optimizer state is loaded."""
        self._started().follow(optimizer or self.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:  # the last micro-batch of a step; clipping comes next
            self.preconditioner.pull_back()
        return loss

    def evaluation_loop(self, *args, **kwargs):
        self._started()
        return super().evaluation_loop(*args, **kwargs)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.load_pc(Path(self.state.best_model_checkpoint))

    def load_pc(self, checkpoint: Path) -> None:
        if not (checkpoint / FILE).exists():
            raise UserError(
                f"{checkpoint / FILE} is missing: the model there holds PC(W), and only that file has its W"
            )
        self.preconditioner.load_state_dict(torch.load(checkpoint / FILE, map_location="cpu", weights_only=True))
