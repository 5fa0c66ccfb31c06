"""What `pc.precondition` returns: PC(W) once per optimizer step, because the weights change only then.

The attribute that holds a gradient says what it is the gradient of:

    backward()             weight.grad: of PC(W)
    pull_back()            weight.grad becomes weight_orig.grad and weight_gamma.grad: a vector-Jacobian product
    optimizer.step()       moves W = weight_orig and gamma
    after it               u and v advance, and PC(W) is written into weight

Which optimizers are followed, and how a model starts and ends with PC, is here; what happens in a step, in `pc.watch`.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pc import followed
from pc.errors import UserError
from pc.guard import ENDED, LOST, NOT_PULLED_BACK, remove_guards
from pc.shards import local, on_any_rank
from pc.step import Step, checksums
from pc.targets import counted, wildcard_layers
from pc.watch import Phase, State, Watch, has_rate
from pc.weight import Tensors, named_weights, versions


def reshard(models: Iterable[nn.Module]) -> None:
    """Put sharded parameters back into FSDP's modules: while they hold unsharded ones, a write to a shard has no effect."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class NotForDDP:
    """Read by `DistributedDataParallel` when it wraps a model: in backward passes it would wait for gradients of W."""

    def __iter__(self):
        raise UserError("DDP cannot wrap a model after pc.precondition: call pc.precondition(ddp, optimizer) after it")


_live: "weakref.WeakSet[Preconditioner]" = weakref.WeakSet()


def preconditioners_of(*models: nn.Module) -> "list[Preconditioner]":
    """The preconditioners of weights in the models; a copy of a model has none."""
    modules = {module for model in models for module in model.modules()}
    return [one for one in _live if any(w.module in modules for w in one.weights.values())]


class Preconditioner(Watch):
    """Writes PC(W) and pulls gradients back; `pc.precondition` makes it.

    Attributes:
        weights: by name.
    """

    def __init__(self, models: list[nn.Module], process_group: dist.ProcessGroup | None = None) -> None:
        modules = [module for model in models for module in model.modules()]
        weights = {name: weight for model in models for name, weight in named_weights(model)}
        had_w = any(weight.orig is not None for weight in weights.values())
        for weight in weights.values():
            if weight.orig is None:
                weight.start()
        replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
        sharing = process_group or next((ddp.process_group for ddp in replicas), None)
        splits = {name: weight.split for name, weight in weights.items()}
        super().__init__(models, weights, replicas, Step(splits, sharing, replicas))
        for model in models:
            model._ddp_params_and_buffers_to_ignore = NotForDDP()  # type: ignore[assignment]
        _live.add(self)
        unfollowed = register_optimizer_step_pre_hook(partial(_require_w, weakref.ref(self)))
        self._stop_asking = weakref.finalize(self, unfollowed.remove)
        # `pc.attach` puts guards on weights that do not hold PC(W), and a copy may be an average of PC(W) and of W
        if remove_guards(modules) or (
            had_w and self._step.find_unwritten({name: weight.tensors() for name, weight in self.weights.items()})
        ):
            self._write(advance=True, share=True)

    def __reduce__(self):
        raise UserError(
            "a preconditioner cannot be copied or saved: use copy.deepcopy((model, optimizer)), and give the copies to "
            "pc.precondition; it has no state beyond theirs"
        )

    def __repr__(self) -> str:
        lines = [f"{wildcard_layers(name)}: {weight.split.describe()}" for name, weight in self.weights.items()]
        return "\n  ".join([f"Preconditioner of {len(lines)} weights", *counted(lines)])

    def _require_pc(self) -> None:
        if self not in _live:
            raise UserError(ENDED)

    def require_loaded(self) -> None:
        """After a load that skips missing tensors: raise a `UserError` if any tensor of a weight was not loaded."""
        for name, *both in zip(self.weights, versions(self.weights.values()), self._versions, strict=True):
            if any(new == old for new, old in zip(*both, strict=True) if new is not None):
                raise UserError(f"{name} was not loaded with its W, gamma, u and v")

    def note_wrapped(self) -> None:
        """Call it on every rank once a trainer has wrapped the model and loaded what it loads. DDP has broadcast all weights,
        which changes no values. PC(W) is written where W is newer, as in a state of averages.

        Raises:
            UserError: `weight` is not PC(W) of its W, and W was not changed.
        """
        with self._lock:
            tensors = {name: weight.tensors() for name, weight in self.weights.items()}
            if all(one.effective.dtype.itemsize >= 4 for one in tensors.values()):  # else PC(W) is only evaluated
                has_moved = dict(zip(tensors, self._have_moved([*tensors.values()]), strict=True))
                unwritten = self._step.find_unwritten(tensors)
                lost = [name for name in unwritten if not has_moved[name]]
                if lost and self._state.phase is not Phase.MOVED:
                    raise UserError(f"{lost[0]} {LOST}")
                if unwritten:
                    self._write(advance=True, share=False)
            self._note_written(State(Phase.WRITTEN))

    def _have_moved(self, tensors: list[Tensors]) -> list[float]:
        """Whether each W or gamma has changed on any rank: by version counters, or by values, because Lightning puts averages
        in place through `.data`."""
        both = zip(versions(self.weights.values()), self._versions, strict=True)
        (kind, before), (kind_now, now) = self._checksums, checksums(tensors)
        have = torch.tensor([new[1:3] != old[1:3] for new, old in both], device=now.device)
        if kind == kind_now:
            have |= (before != now)[: 2 * len(tensors)].view(2, -1).any(0)
        return on_any_rank(have, [one.orig for one in tensors]).tolist()

    def note_loaded(self) -> None:
        """Call it on every rank when all tensors of all weights were loaded: `weight` then counts as PC(W) of W."""
        self._note_written(State(Phase.WRITTEN))

    @torch.no_grad()
    def clear_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Drop the gradients of PC(W), also for an optimizer's `zero_grad(set_to_none=False)`; of one that is given, of the
        weights whose W it holds, or their gamma where W is frozen."""
        held = None if optimizer is None else followed.ids_of_parameters(optimizer)
        for weight in self.weights.values():
            decides = weight.orig if weight.orig.requires_grad or weight.gamma is None else weight.gamma
            if held is not None and id(decides) not in held:
                continue
            gradient = weight.effective.grad
            weight.effective.grad = gradient.zero_() if self._keeps_gradients and gradient is not None else None

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Within it the parameters of an optimizer may be iterated over while there are gradients of PC(W)."""
        self._is_exempt = True
        try:
            yield
        finally:
            self._is_exempt = False

    @torch.no_grad()
    def write_pc(self) -> None:
        """Advance u and v and write PC(W). Call it after W was changed, and if no optimizer is followed, after each step.

        Raises:
            UserError: `weight` was changed but W was not, or a weight is not where it was.
        """
        with self._lock:
            self._find_changes()
            self._write(advance=True, share=False)

    def restart(self) -> None:
        """Take the current weights as W, with gamma 1 and new u and v. Call it after plain weights were loaded."""
        with self._lock:
            self._require_pc()
            for weight in self.weights.values():
                weight.start()
            self._write(advance=True, share=False)

    def take_worst(self) -> Tensor:
        """The largest ratio of a second start to its estimate u^T W v (`pc.method.second_start`) that this rank has got since
        the last call, [1]; 0 if none. Does not wait for the device."""
        worst, self._worst = self._worst, None
        return local(next(iter(self.weights.values())).orig).new_zeros(1) if worst is None else worst.reshape(1)

    @contextlib.contextmanager
    def exchange(self, looks: bool) -> Iterator[None]:
        """Around `eval` or `train` of a schedule-free optimizer, which exchange W for its average, or do nothing: if they did,
        PC(W) is written. `looks`: by W's values, which waits for the device; else by version counters."""
        with self._lock:
            self._find_changes()  # by others
            tensors = [weight.tensors() for weight in self.weights.values()]
            before = checksums(tensors)[1] if looks else None
            yield
            if before is None:
                return self.write_if_stale()
            has_moved = (before != checksums(tensors)[1]).any()[None]
            if on_any_rank(has_moved, [one.orig for one in tensors]).any():
                self._write(advance=True, share=False)
            else:
                self._versions = versions(self.weights.values())

    def follow(self, *optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """From now on write PC(W) after all of these optimizers have stepped.

        W takes the place of `weight` in them, and gets its optimizer state. A gamma that none of them has joins one of
        their parameter groups (`pc.followed`), with that group's learning rate and weight decay. These optimizers replace
        earlier ones of the same weights. Call it again after weights were unfrozen.

        Raises:
            UserError: a trained weight is in none of them, none can train a gamma, or another preconditioner follows one.
        """
        self._require_pc()
        given = followed.join(self.weights.values(), optimizers, self)
        trained = followed.ids_of_parameters(*given)
        ours = {id(p) for weight in self.weights.values() for p in weight.trained}
        for earlier in [*self._hooks]:
            # the new ones train all of our parameters that it trains
            if ours & followed.ids_of_parameters(earlier) <= trained:
                self._leave(earlier, restore=earlier not in given)
        for optimizer in given:
            self._hooks[optimizer] = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_pre_hook(lambda _: setattr(self, "_is_exempt", True)),
                optimizer.register_state_dict_post_hook(lambda *_: setattr(self, "_is_exempt", False)),
            ]
        if self._hooks:
            self._stop_asking()
        self._note_followed()

    def leave(self) -> None:
        """Give the optimizers their parameters back, and take all hooks away; `pc.merge` and `pc.detach` call it."""
        for optimizer in [*self._hooks]:
            self._leave(optimizer)
        self._stop_asking()
        self._set(State(Phase.ENDED))
        _live.discard(self)

    def _leave(self, optimizer: Optimizer, restore: bool = True) -> None:
        for hook in self._hooks.pop(optimizer):
            hook.remove()
        if restore:
            followed.leave(self.weights.values(), optimizer)


@torch.compiler.disable
def _require_w(reference: "weakref.ref[Preconditioner]", optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Called before a step of any optimizer, as long as the preconditioner follows none.

    Raises:
        UserError: the step would train PC(W) in place of W, or, by an optimizer made before W, everything but W.
    """
    preconditioner = reference()
    if preconditioner is None:
        return
    held = followed.ids_of_parameters(optimizer)
    may_move = has_rate(optimizer)
    for weight in preconditioner.weights.values():
        if may_move and weight.effective.grad is not None and id(weight.effective) in held:
            raise UserError(NOT_PULLED_BACK)
        if weight.orig.grad is not None and id(weight.effective) in held and id(weight.orig) not in held:
            raise UserError(
                f"this {type(optimizer).__name__} was made before pc.precondition and does not have W; call "
                "preconditioner.follow(optimizer), or give it to pc.precondition(model, optimizer)"
            )
