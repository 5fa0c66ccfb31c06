"""The watchman: when PC is computed, and what is refused because it would train the wrong thing in silence.

`weight` is PC(W), so forward and backward passes are those of a plain model, for any number of micro-batches and any
parallelism. What `weight`, its gradient and W are to each other is one attribute, a `State`, which `Watch` alone sets:

    WRITTEN        `weight` is PC(W). Backward passes add up gradients of it.
    PULLED_BACK    They have become gradients of W and gamma. Optimizers may step, and `waiting` lists those that have yet to.
    MOVED          W or gamma is newer than PC(W). After a step, guards on the modules write PC(W) before a forward pass.
    ENDED          `pc.merge` or `pc.detach` has removed PC.

    in                    by                               becomes
    WRITTEN, PULLED_BACK  pull_back                        PULLED_BACK, all wait, also who skipped the last step
    PULLED_BACK           `follow`                         PULLED_BACK, all wait
    PULLED_BACK, MOVED    a step of one that waits         MOVED, the others wait; if none does, PC(W) is written: WRITTEN
    any                   a step of one that does not      if gradients of W are left, the same as if all had waited
    MOVED                 a forward pass, `write_pc`       PULLED_BACK if some wait, else WRITTEN
    any                   somebody changes W               MOVED; without guards, pull_back is refused until `write_pc`
    any                   a write fails                    MOVED
    any                   a whole state loads              WRITTEN

`stepping` is the last optimizer whose step may have moved W, and it is in `waiting` until that step has ended. So a step that
raises has not been taken, and version counters tell whether it has moved W. A closure pulls back inside a step; if that
optimizer waits, `waiting` stays as it is. `pull_back` is linear in the gradient, so one call on the accumulated gradient
equals the sum of the backward passes of `pc.PCLinear`. Both passes go on in `pc.step`.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pc import guard
from pc.errors import UserError
from pc.step import Arrival, Step, Stuck, checksums, should_move
from pc.weight import Tensors, Weight, require_in_place, versions

LOOKS = 32
"""The first steps of an optimizer, in which it must move W (`pc.step.Stuck`)."""

Phase = Enum("Phase", ["WRITTEN", "PULLED_BACK", "MOVED", "ENDED"])


class State(NamedTuple):
    """See the module's docstring."""

    phase: Phase
    waiting: frozenset[Optimizer] = frozenset()
    """followed optimizers that hold W or gamma and have not stepped since the last pull back"""
    stepping: Optimizer | None = None
    """the last whose step may have moved W, since the last pull back"""


class Watch:
    """Knows the state of a model's weights, and calls the step."""

    def __init__(
        self, models: list[nn.Module], weights: dict[str, Weight], replicas: list[DistributedDataParallel], step: Step
    ) -> None:
        self._models, self.weights, self._replicas, self._step = models, weights, replicas, step
        self._hooks: dict[Optimizer, list[RemovableHandle]] = {}
        """by followed optimizer"""
        units = (m for model in models for m in model.modules() if isinstance(m, FSDPModule))
        self._guarded = [*dict.fromkeys((*models, *units, *(weight.module for weight in weights.values())))]
        self._guards: list[RemovableHandle] = []
        """on these modules, while PC(W) is older than W"""
        self._keeps_gradients = False
        """whether gradients of PC(W) stay allocated, so that only the state tells whether there are any"""
        self._is_exempt = False
        """whether an optimizer makes its state dict or clears gradients, which may happen between micro-batches"""
        self._runs_closure = False
        """whether the closure of a step is running, in which gradients are pulled back when they are needed"""
        self._worst: Tensor | None = None
        """the largest ratio of a second start on this rank since the last `take_worst`"""
        self._looks, self._stuck = Counter[Optimizer](), Stuck()
        self._checksums: tuple[Any, Tensor]
        """of PC(W), when it was written, and of what it was computed from"""
        self._found_moved = Arrival()
        self._lock = threading.RLock()  # a thread may evaluate while a step is taken
        self._note_written(State(Phase.WRITTEN))

    def _set(self, state: State) -> None:
        """Take this as the state, with the tensors as they are, after a write, a load or a step."""
        self._state = state
        self._versions = versions(self.weights.values())
        if state.phase is not Phase.MOVED:
            while self._guards:
                self._guards.pop().remove()
        elif not self._guards:
            hook = guard.Guard(guard.COPIED_EARLY, self.write_if_stale)
            self._guards = [module.register_forward_pre_hook(hook, prepend=True) for module in self._guarded]

    # --- the two passes

    @torch.no_grad()
    def pull_back(self, set_to_none: bool = True) -> None:
        """Turn the gradients of PC(W) in `weight.grad` into gradients of W and gamma, added to their `grad`.

        Call it after the last backward pass of a step, before unscaling and clipping; or after each that averages over ranks.

        Args:
            set_to_none: else `weight.grad` is zeroed and stays allocated, 4 bytes for each entry, as a replayed CUDA graph
                needs. From then on `zero_grad` zeroes it too, and of what comes before `pull_back` only a step is refused,
                unless an optimizer has skipped the last one.

        Raises:
            UserError: there are no gradients, W, gamma, u, v or PC(W) has changed since PC(W) was written, or a weight with a
                gradient has its W or gamma in no followed optimizer.
        """
        with self._lock:
            self._find_changes()
            if self._state.phase is Phase.MOVED:
                raise UserError(guard.NEWER)
            if not all(ddp.require_backward_grad_sync for ddp in self._replicas):
                raise UserError("pull_back() within no_sync(): call it after the backward pass that averages gradients")
            tensors = {name: weight.tensors() for name, weight in self.weights.items()}
            (kind, written), (kind_now, now) = self._checksums, checksums(tensors.values())
            if kind == kind_now and (moved := self._found_moved.find(written != now)) is not None:
                raise UserError(guard.what_moved([*self.weights.values()], moved, self._stepped()))
            self._keeps_gradients = not set_to_none
            used = {name: one for name, one in tensors.items() if one.effective.grad is not None}
            if len(used) < len(tensors):  # another parameter may have got the weight's place and gradient
                require_in_place(self.weights.values(), self._models)
            holders = self._holders(tensors.values())
            if used:
                self._pull_back(used, set().union(*holders.values()))
            elif any(one.effective.requires_grad for one in tensors.values()):
                raise UserError(guard.NO_GRADIENT)
            self._state = State(Phase.PULLED_BACK, frozenset(holders))

    def _pull_back(self, used: dict[str, Tensors], held: set[int]) -> None:
        """`held`: the ids of each W and gamma that a followed optimizer holds."""
        gradients: list[Any] = [one.effective.grad for one in used.values()]
        for (name, (_, orig, gamma, *_others)), gradient in zip(used.items(), gradients, strict=True):
            trained = [p for p in (orig, gamma) if p is not None and p.requires_grad]
            if not trained:
                raise UserError(f"{name} {guard.FROZEN}")
            if self._hooks and any(id(p) not in held for p in trained):
                raise UserError(f"{name} was unfrozen; call preconditioner.follow(optimizer) first")
            if gradient.requires_grad:
                raise UserError(f"the gradient of {name} {guard.HAS_GRAPH}")
        found = self._step.pull_back(used, gradients)
        for one, of_pc, of_both in zip(used.values(), gradients, found, strict=True):
            one.effective.grad = of_pc.zero_() if self._keeps_gradients else None
            for parameter, gradient in zip((one.orig, one.gamma), of_both, strict=True):
                if parameter is not None and parameter.requires_grad:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def write_if_stale(self) -> None:
        """`write_pc`, if W is known to be newer than PC(W). If weights are not sharded, one rank may call it alone."""
        with self._lock:
            self._find_changes()
            if self._state.phase is Phase.MOVED:
                self._write(advance=True, share=False)

    @torch.inference_mode(False)  # as `pc.precondition`; an evaluation may write
    def _write(self, advance: bool, share: bool) -> None:
        """`share`: all ranks call this now, so that those with equal whole weights may divide the matrices among them."""
        try:
            require_in_place(self.weights.values(), self._models)
            tensors = {name: weight.tensors() for name, weight in self.weights.items()}
            worst = self._step.write(tensors, advance, share)
        except BaseException:  # also Ctrl-C in a notebook: W is whole, and the next write starts from it
            self._set(self._state._replace(phase=Phase.MOVED))
            raise
        self._worst = worst if self._worst is None else torch.maximum(self._worst, worst)
        (kind, before), self._checksums = self._checksums, checksums(tensors.values())
        kind_now, now = self._checksums
        self._set(self._state._replace(phase=Phase.PULLED_BACK if self._state.waiting else Phase.WRITTEN))
        if kind == kind_now and (stuck := self._stuck.look(before, now)) is not None:
            name, one = [*tensors.items()][stuck]
            holder = next((o for o, ids in self._holders([one]).items() if id(one.orig) in ids), None)
            raise UserError(f"{type(holder).__name__} {guard.STUCK.format(name, Stuck.LIMIT)}")

    # --- steps of optimizers

    def has_gradients(self) -> bool:
        """Whether there are gradients of PC(W); if they stay allocated, whether there may be, as always in a closure."""
        is_pulled_back = self._keeps_gradients and not (self._runs_closure or self._state.phase is Phase.WRITTEN)
        return not is_pulled_back and any(weight.effective.grad is not None for weight in self.weights.values())

    @torch.compiler.disable
    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        _, *given = args  # the optimizer is the first
        closure = kwargs.get("closure", given[0] if given else None)
        with self._lock:
            self._find_changes()  # by others, such as a load; after the step W has changed anyway
            waits = optimizer in self._state.waiting
            self._state = self._state._replace(stepping=None)
            if closure is None and self.has_gradients():
                raise UserError(guard.NOT_PULLED_BACK)
            self._begin(optimizer)
        if closure is None:
            return None
        with_pc = partial(self._run_closure, closure, optimizer, waits)
        if given:
            return (optimizer, with_pc, *given[1:]), kwargs
        return args, {**kwargs, "closure": with_pc}

    def _begin(self, optimizer: Optimizer) -> None:
        """Note that it is stepping, if this may move W or gamma: asked before the step, which may clear gradients."""
        phase, waiting, _ = self._state
        tensors = [weight.tensors() for weight in self.weights.values()]
        if not any(p is not None and p.grad is not None for one in tensors for p in (one.orig, one.gamma)):
            return
        if optimizer not in waiting:  # no pull back since its last step: only what is left of gradients may move W
            waiting = frozenset(self._holders(tensors))
            if optimizer not in waiting or not has_rate(optimizer):
                return
        self._state = State(phase, waiting, optimizer)
        if self._looks[optimizer] < LOOKS:
            rates = {id(p): group.get("lr", 1.0) for group in optimizer.param_groups for p in group["params"][:]}
            should = should_move(tensors, rates)
            if hasattr(optimizer, "found_inf"):  # a fused step under a gradient scaler, which may do nothing
                should = should & (optimizer.found_inf == 0)
            self._stuck.should.append(should)

    def _run_closure(self, closure: Any, optimizer: Optimizer, waits: bool) -> Any:
        """`closure` with PC(W) of what W is now, and with gradients pulled back. `waits`: the optimizer has yet to step."""
        with self._lock:
            is_behind = self._state.phase is Phase.MOVED  # by others
            self._find_changes()  # by this step itself, if it calls the closure again, as LBFGS does
            if self._state.phase is Phase.MOVED:
                # u and v advance, unless only others have moved W: then the end of this step advances them
                self._write(advance=not (is_behind and waits), share=False)
            waiting = self._state.waiting
        self._runs_closure = True
        try:
            with torch.enable_grad():
                loss = closure()
            if self.has_gradients():
                self.pull_back(set_to_none=not self._keeps_gradients)
        finally:
            self._runs_closure = False
        if optimizer in waiting:
            self._state = self._state._replace(waiting=waiting)
        self._begin(optimizer)
        return loss

    @torch.compiler.disable
    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        with self._lock:
            phase, waiting, stepping = self._state
            now = versions(self.weights.values())
            if stepping is not optimizer:
                self._versions = now
                return
            self._looks[optimizer] += 1
            both = zip(self.weights, self._versions, now, strict=True)
            wrong = [name for name, (of_pc, *_), (of_pc_now, *_) in both if of_pc != of_pc_now]
            # it stays `stepping`, because a subclass may move W after its parent's step, which has hooks of its own
            self._state = State(phase, waiting - {optimizer}, optimizer)
            if self._state.waiting:
                self._set(self._state._replace(phase=Phase.MOVED))
            else:
                self._write(advance=True, share=True)
            if wrong:
                raise UserError(f"{self._stepped()} {guard.MOVED_PC.format(wrong[0])}")

    def _stepped(self) -> str:
        return "an optimizer" if self._state.stepping is None else type(self._state.stepping).__name__

    def _holders(self, tensors: Iterable[Tensors]) -> dict[Optimizer, set[int]]:
        """The followed optimizers that hold a W or gamma now, with the ids of those; they may get others later."""
        ours = {id(p) for one in tensors for p in (one.orig, one.gamma)}
        # [:] makes a plain list, without the check of `Parameters`
        held = {o: ours & {id(p) for group in o.param_groups for p in group["params"][:]} for o in self._hooks}
        return {optimizer: ids for optimizer, ids in held.items() if ids}

    # --- what else changes W

    def _note_written(self, state: State) -> None:
        """`weight` counts as PC(W) of what W is now, though this has not written it."""
        self._step.forget()
        self._checksums = checksums([weight.tensors() for weight in self.weights.values()])
        self._set(state)

    def _note_followed(self) -> None:
        """After other optimizers are followed: who has yet to step in the step that has begun."""
        self._looks, self._stuck = Counter(), Stuck()
        phase, waiting, _ = self._state
        followed = self._holders([weight.tensors() for weight in self.weights.values()]).keys()
        self._state = State(phase, frozenset(followed if phase is Phase.PULLED_BACK else waiting & followed))

    def _find_changes(self) -> None:
        """Find by version counters which of `weight`, W with gamma, and u have changed since they were noted, and draw the
        conclusion:

            all three                  a state was loaded, if `weight` is PC(W); else somebody has changed W
            W or gamma, not `weight`   somebody changed it, so PC(W) is older
            `weight`, but not all      an error, unless PC(W) is older and will be written anyway

        Counters answer at once, without waiting for the device, and tell these three apart. Neither fused optimizers nor
        changes through `.data` move them: checksums find those, and changes of u or v alone, when gradients are pulled back.
        """
        if self._state.phase is Phase.ENDED:
            raise UserError(guard.ENDED)
        both = zip(versions(self.weights.values()), self._versions, strict=True)
        changes = [[new != old for new, old in zip(*of_one, strict=True)] for of_one in both]
        if not any(map(any, changes)):
            return
        require_in_place(self.weights.values(), self._models)
        loaded = [effective and any(trained) and u for effective, *trained, u, _ in changes]
        for weight, (effective, *_others), is_loaded in zip(self.weights.values(), changes, loaded, strict=True):
            if effective and not is_loaded and self._state.phase is not Phase.MOVED:
                raise UserError(f"{weight.name} {guard.CHANGED.format(weight.attribute)}")
        tensors = {name: weight.tensors() for name, weight in self.weights.items()}
        if any(loaded) and not self._step.find_unwritten(tensors):
            self._note_written(State(Phase.WRITTEN) if all(loaded) else self._state)
        elif any(any(trained) for _, *trained, _u, _v in changes):
            self._state = self._state._replace(phase=Phase.MOVED)
        self._versions = versions(self.weights.values())


class Parameters(list):
    """The parameters of a followed optimizer's group. Iterating over them while there are gradients of PC(W) raises an error:
    code that unscales, clips or measures gradients would miss those. In a closure it pulls them back. Copies are plain lists."""

    def __init__(self, parameters: Iterable[nn.Parameter], preconditioner: Watch) -> None:
        super().__init__(parameters)
        self.preconditioner = preconditioner

    @torch.compiler.disable
    def __iter__(self) -> Iterator[nn.Parameter]:
        watch = self.preconditioner
        if watch._is_exempt:
            return super().__iter__()
        if watch._runs_closure and watch.has_gradients():
            watch.pull_back(set_to_none=not watch._keeps_gradients)
        if not watch._keeps_gradients and watch.has_gradients():
            raise UserError(guard.NOT_PULLED_BACK)
        return super().__iter__()

    def __reduce_ex__(self, _):
        return list, (self[:],)


def has_rate(optimizer: Optimizer) -> bool:
    """Whether any rate is not 0. torch.distributed.checkpoint takes steps at rate 0, only to create optimizer state."""
    return any(group.get("lr") != 0 for group in optimizer.param_groups)
