"""PC in Lightning's Trainer, with automatic or manual optimisation, accumulation, clipping and checkpoints.

trainer = lightning.Trainer(callbacks=[PCCallback()], ...)
trainer.fit(module)  # whose network has been given to pc.attach
"""

from typing import Any

import torch
from lightning.pytorch import Callback

from pc.factory import precondition
from pc.integrations import is_of, whole_state
from pc.preconditioner import Preconditioner


class PCCallback(Callback):
    """Makes PC's preconditioner, follows the module's optimizers, and is saved and loaded with Lightning's
    checkpoints."""

    def __init__(self) -> None:
        self.preconditioner: Any = None  # a Preconditioner, from the first run on
        self._loaded: dict[str, Any] | None = None

    def _start(self, trainer) -> Preconditioner:
        if not is_of(self.preconditioner, trainer.model):
            self.preconditioner = precondition(trainer.model)
        if self._loaded is not None:
            self.preconditioner.load_state_dict(self._loaded)
            self._loaded = None
        return self.preconditioner

    def on_fit_start(self, trainer, pl_module) -> None:
        self._start(trainer).follow(*trainer.optimizers)

    def on_validation_start(self, trainer, pl_module) -> None:
        self._start(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_train_start = on_validation_start  # strategies for sharded models load after `on_fit_start`

    def on_before_optimizer_step(self, trainer, pl_module, optimizer: torch.optim.Optimizer) -> None:
        """After the last backward pass of a step, before clipping."""
        preconditioner = self._start(trainer)
        if preconditioner.has_gradients() and not preconditioner.is_pulled_back:
            preconditioner.pull_back()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.preconditioner is None else whole_state(self.preconditioner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None  # for the preconditioner, which may not be there yet
