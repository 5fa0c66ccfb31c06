"""PC in Lightning's Trainer, with automatic or manual optimisation, accumulation, clipping and checkpoints.

trainer = lightning.Trainer(callbacks=[PCCallback()], ...)
trainer.fit(module)  # whose network has been given to pc.attach
"""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pc.errors import UserError
from pc.integrations import has_pc, started


class PCCallback(Callback):
    """Makes PC's preconditioner, follows the module's optimizers, and pulls gradients back. List it before callbacks that
    copy the module, such as those that average weights.

    Raises:
        UserError: the module gets PC too late to load a checkpoint.
    """

    preconditioner: Any = None
    """a Preconditioner, from the first run on"""

    def _start(self, trainer, pl_module) -> None:
        self.preconditioner = started(pl_module, is_replicated=isinstance(trainer.strategy, DDPStrategy))

    def setup(self, trainer, pl_module, stage: str) -> None:
        """Start before a checkpoint is loaded. Strategies for sharded models load later: there `on_fit_start` does it."""
        if has_pc(pl_module) and not trainer.strategy.restore_checkpoint_after_setup:
            pl_module.to(trainer.strategy.root_device)
            self._start(trainer, pl_module)
            if stage == TrainerFn.FITTING:
                self._follow_what_is_made(pl_module)

    def _follow_what_is_made(self, pl_module) -> None:
        """Follow the optimizers before `on_fit_start`: tools that look for a rate or a batch size save their states earlier,
        and take this callback out while they try steps. Their steps pull back in the closure."""
        configure = pl_module.configure_optimizers

        def configured() -> Any:
            del pl_module.configure_optimizers  # this function
            made = configure()
            self.preconditioner.follow(*(one for one in tree_leaves(made) if isinstance(one, Optimizer)))
            return made

        pl_module.configure_optimizers = configured

    def on_fit_start(self, trainer, pl_module) -> None:
        if self.preconditioner is None and not trainer.strategy.restore_checkpoint_after_setup:
            raise UserError(
                "the module had no PC when it was set up, so no checkpoint could load: call pc.attach in its __init__"
            )
        self._start(trainer, pl_module)
        self.preconditioner.note_wrapped()
        self.preconditioner.follow(*trainer.optimizers)

    def on_validation_start(self, trainer, pl_module) -> None:
        if trainer.state.fn != TrainerFn.FITTING and has_pc(pl_module):
            self._start(trainer, pl_module)
            self.preconditioner.note_wrapped()

    on_test_start = on_predict_start = on_validation_start

    def on_after_backward(self, trainer, pl_module) -> None:
        """After the last backward pass of a step, before gradients are unscaled and clipped."""
        for weight in self.preconditioner.weights.values():
            if not any(parameter.requires_grad for parameter in weight.trained):
                weight.effective.grad = None  # frozen by `toggle_optimizer`, which freezes what optimizers hold
        is_synchronised = getattr(trainer.strategy.model, "require_backward_grad_sync", True)
        # under manual optimisation a pass may be of another part, such as a GAN's discriminator
        if is_synchronised and self.preconditioner.has_gradients() and not trainer.fit_loop._should_accumulate():
            self.preconditioner.pull_back()
