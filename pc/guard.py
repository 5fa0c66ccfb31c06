"""A hook that keeps modules from multiplying by a weight that is not PC(W)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from pc.errors import UserError
from pc.weight import Weight, named_weights

NO_PRECONDITIONER = (
    "it has no preconditioner; call pc.precondition(model, optimizer) after pc.attach, and after FSDP or DDP if used"
)
COPIED_EARLY = "this copy was made before all optimizers had stepped; call preconditioner.write_pc() before you copy"
NOT_PULLED_BACK = (
    "there are gradients of PC(W): preconditioner.pull_back(), which turns them into those of W, was not called after the "
    "last backward(); call it before gradients are unscaled, clipped or measured, and before optimizer.step()"
)
NEWER = (
    "W is newer than PC(W), which the last forward pass used: an optimizer did not step, or W was changed; call "
    "preconditioner.write_pc() before the forward pass; for an optimizer made later, call preconditioner.follow(optimizer)"
)
NO_GRADIENT = (
    "pull_back() found no gradient of a weight with PC; call it after backward(), and where a CUDA graph writes gradients to "
    "fixed places, as pull_back(set_to_none=False)"
)
FROZEN = (
    "has gradients, but its W and gamma are frozen: unfreeze the module, which has all three, not a list of parameters made "
    "before pc.precondition"
)
HAS_GRAPH = (
    "has a graph, by backward(create_graph=True), but that of W can have none: methods of second order cannot train weights "
    "with PC"
)
CHANGED = (
    "was changed while it held PC(W), and optimizers train W: change {}_orig and call preconditioner.write_pc(); after loading "
    "plain weights, call preconditioner.restart(); after swapping averages back, preconditioner.note_loaded() on every rank; "
    "and give pc.precondition all optimizers"
)
LOST = (
    "was changed after PC had started, and its W was not, so the change would be lost: load plain weights before, in the module's "
    "__init__ or before the trainer is made"
)
MAKE_IT_LATER = (
    "call preconditioner = pc.precondition(model) first, make it from model.parameters(), and call "
    "preconditioner.write_pc() after each step"
)
"""What an optimizer needs that cannot be followed."""
MOVED_PC = f"has moved PC(W) of {{}}, not W; it has parameters of its own: {MAKE_IT_LATER}"
STUCK = (
    "has not moved W of {} in {} steps with a gradient and a rate; it may have parameters of its own: " + MAKE_IT_LATER
)
MOVED = (
    "was changed after PC(W) was written, by a load of some tensors, through `.data`, by a wrapper around {} or by one that is "
    "not followed: call preconditioner.write_pc() after it"
)
ENDED = (
    "pc.merge or pc.detach has removed PC from the model of this preconditioner; to train on with PC, call "
    "pc.attach and pc.precondition again; to evaluate a plain copy, load pc.plain_state_dict(model)"
)


def what_moved(weights: Sequence[Weight], place: int, optimizer: str) -> str:
    """What has changed since the last write, by its place in `pc.step.checksums`, and what to do."""
    of, index = divmod(place, len(weights))
    if of == 3:
        return f"u or v {MOVED.format(optimizer)}"
    weight = weights[index]
    if of == 2:
        return f"{weight.name} {CHANGED.format(weight.attribute)}"
    return f"W or gamma of {weight.name} {MOVED.format(optimizer)}"


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
