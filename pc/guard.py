"""A hook that keeps modules from multiplying by a weight that is not PC(W)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from pc.errors import UserError
from pc.weight import named_weights

NO_PRECONDITIONER = (
    "it has no preconditioner; call pc.precondition(model, optimizer) after pc.attach, and after FSDP or DDP if used"
)
COPIED_EARLY = "this copy was made before all optimizers had stepped; call preconditioner.write_pc() before you copy"
NOT_PULLED_BACK = (
    "there are gradients of PC(W): preconditioner.pull_back(), which turns them into those of W, was not called after the "
    "last backward(); call it before gradients are unscaled, clipped or measured, and before optimizer.step()"
)
ENDED = (
    "pc.merge or pc.detach has removed PC from the model of this preconditioner; to train on with PC, call "
    "pc.attach and pc.precondition again; to evaluate a plain copy, load pc.plain_state_dict(model)"
)


@dataclass(frozen=True)
class Guard:
    """A forward pre-hook of a module whose `weight` is not PC(W) of its W, and of the modules around it. It writes PC(W),
    or raises an error. Register it with `prepend=True`: before FSDP's own hook, which gathers the weights."""

    reason: str
    """why there is no PC(W), for the error"""
    write: Callable[[], None] | None = None
    """writes PC(W); the hook of a copied module has none"""

    def __reduce__(self):
        return Guard, (self.reason,)

    def __call__(self, module: nn.Module, _) -> None:
        if self.write is not None:
            return self.write()
        for name, _weight in named_weights(module):  # the first, if there is one
            raise UserError(f"there is no PC(W) of {name}: {self.reason}")


def run_guards(model: nn.Module) -> None:
    """Write PC(W) where a guard finds it missing; raise a `UserError` where it cannot be written."""
    for module in model.modules():
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, Guard):
                hook(module, None)


def remove_guards(modules: Iterable[nn.Module]) -> bool:
    """Remove them; returns whether there were any."""
    guards = [(m, key) for m in modules for key, hook in m._forward_pre_hooks.items() if isinstance(hook, Guard)]
    for module, key in guards:
        del module._forward_pre_hooks[key]
    return bool(guards)
