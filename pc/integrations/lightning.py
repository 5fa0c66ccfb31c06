"""PC in Lightning's Trainer, with automatic or manual optimisation, accumulation, clipping and checkpoints.

trainer = lightning.Trainer(callbacks=[PCCallback()], ...)
trainer.fit(module)  # whose network has been given to pc.attach
"""

from typing import Any

import torch
from lightning.pytorch import Callback

from pc.integrations import whole_state
from pc.schedules import Schedule
from pc.step import schedule


class PCCallback(Callback):
    """Makes PC's schedule, follows the module's optimizers, and is saved and loaded with Lightning's checkpoints."""

    def __init__(self) -> None:
        self.schedule: Schedule | None = None
        self._loaded: dict[str, Any] | None = None

    def _start(self, trainer) -> Schedule:
        if self.schedule is None:
            self.schedule = schedule(trainer.model)
        if self._loaded is not None:
            self.schedule.load_state_dict(self._loaded)
            self._loaded = None
        return self.schedule

    def on_fit_start(self, trainer, pl_module) -> None:
        self._start(trainer).follow(*trainer.optimizers)

    def on_train_start(self, trainer, pl_module) -> None:
        self._start(trainer)  # strategies for sharded models load after `on_fit_start`

    def on_validation_start(self, trainer, pl_module) -> None:
        self._start(trainer)

    on_test_start = on_predict_start = on_validation_start

    def on_before_optimizer_step(self, trainer, pl_module, optimizer: torch.optim.Optimizer) -> None:
        """After the last backward pass of a step, before clipping."""
        if self.schedule is not None and self.schedule.has_gradients() and not self.schedule.is_pulled_back:
            self.schedule.pull_back()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.schedule is None else whole_state(self.schedule)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None  # for the schedule, which may not be there yet
