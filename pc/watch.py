"""The watchman: when PC is computed, and what is refused because it would train the wrong thing in silence.

`weight` is PC(W), so forward and backward passes are those of a plain model, for any number of micro-batches and any
parallelism. What `weight`, its gradient and W are to each other is one attribute, a `State`, set in this file alone:

    WRITTEN        `weight` is PC(W). Backward passes add up gradients of it.
    PULLED_BACK    They have become gradients of W and gamma. Optimizers may step, and `waiting` lists those that have yet to.
    MOVED          W or gamma is newer than PC(W). After a step, guards on the modules write PC(W) before a forward pass.
    ENDED          `pc.merge` or `pc.detach` has removed PC.

    WRITTEN ── pull_back ──> PULLED_BACK, all wait ── a step ──> MOVED, others wait ── the last step ──> write, WRITTEN
                                     ^                             │
                                     └── a forward pass, write_pc ─┘  PULLED_BACK, others wait

    WRITTEN, PULLED_BACK ── pull_back ──> PULLED_BACK, all wait: a step begins, whoever has skipped the last one
    any ── somebody changes W ──> MOVED, without guards; pull_back is refused until `write_pc`
    any ── a whole state loads ─> WRITTEN

`stepping` is the last optimizer whose step may have moved W; it waits until that step has ended. So a step that raises has
not been taken, and version counters tell whether it has moved W. A closure pulls back inside a step, which begins nothing new
for those that wait. `pull_back` is linear in the gradient, so one call on the accumulated gradient equals the sum of the
backward passes of `pc.PCLinear`. Both passes go on in `pc.step`.
"""

import contextlib
import threading
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pc.errors import UserError
from pc.guard import COPIED_EARLY, ENDED, NOT_PULLED_BACK, Guard
from pc.moved import Moves
from pc.shards import on_any_rank, shards_of
from pc.step import Step
from pc.weight import Tensors, Weight, require_in_place

Phase = Enum("Phase", ["WRITTEN", "PULLED_BACK", "MOVED", "ENDED"])


class State(NamedTuple):
    """See the module's docstring."""

    phase: Phase
    waiting: frozenset[Optimizer] = frozenset()
    """followed optimizers that hold W or gamma and have not stepped since the last pull back"""
    stepping: Optimizer | None = None
    """the last whose step may have moved W, since the last pull back"""


class Watch:
    """Knows the state of a model's weights, and calls the step.

    Attributes:
        weights: by name.
    """

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
        self._is_saving = False
        """whether an optimizer's state dict is being made, which may happen between micro-batches"""
        self._runs_closure = False
        """whether the closure of a step is running, in which gradients are pulled back when they are needed"""
        self._worst: Tensor | None = None
        """the largest ratio of a second start on this rank since the last `take_worst`"""
        self._moves = Moves(weights)
        self._lock = threading.RLock()  # a thread may evaluate while a step is taken
        self._set(State(Phase.WRITTEN))

    def _set(self, state: State) -> None:
        """Take this as the state, with the tensors as they are, after a write, a load or a step."""
        self._state = state
        self._noted = self._versions()
        if state.phase in (Phase.WRITTEN, Phase.PULLED_BACK):
            self._moves.note_written()
        if state.phase is not Phase.MOVED:
            while self._guards:
                self._guards.pop().remove()
        elif not self._guards:
            guard = Guard(COPIED_EARLY, self.write_if_stale)
            self._guards = [module.register_forward_pre_hook(guard, prepend=True) for module in self._guarded]

    # --- the two passes

    @torch.no_grad()
    def pull_back(self, set_to_none: bool = True) -> None:
        """Turn the gradients of PC(W) in `weight.grad` into gradients of W and gamma, added to their `grad`.

        Call it after the last backward pass of a step, before unscaling and clipping; or after each that averages over ranks.

        Args:
            set_to_none: else `weight.grad` is zeroed and stays allocated, 4 bytes for each entry, as a replayed CUDA graph
                needs. From then on `zero_grad` zeroes it too, and of what comes before `pull_back` only a step is refused.

        Raises:
            UserError: there are no gradients, W or PC(W) has changed since PC(W) was written, or a weight with a
                gradient has its W in no followed optimizer.
        """
        with self._lock:
            self._find_changes()
            if self._state.phase is Phase.MOVED:
                raise UserError(
                    "W is newer than PC(W), which the last forward pass used: an optimizer did not step, or W was changed; "
                    "call preconditioner.write_pc() before the forward pass; for an optimizer made later, "
                    "call preconditioner.follow(optimizer)"
                )
            self._moves.look()
            if not all(ddp.require_backward_grad_sync for ddp in self._replicas):
                raise UserError("pull_back() within no_sync(): call it after the backward pass that averages gradients")
            self._keeps_gradients = not set_to_none
            used = {name: w.tensors() for name, w in self.weights.items() if w.effective.grad is not None}
            if len(used) < len(self.weights):  # another parameter may have got the weight's place and gradient
                require_in_place(self.weights.values(), self._models)
            holders = self._holders()
            if used:
                self._pull_back(used, set().union(*holders.values()))
            elif any(weight.effective.requires_grad for weight in self.weights.values()):
                raise UserError(
                    "pull_back() found no gradient of a weight with PC; call it after backward(), and where a CUDA graph "
                    "writes gradients to fixed places, as pull_back(set_to_none=False)"
                )
            self._state = State(Phase.PULLED_BACK, frozenset(holders))

    def _pull_back(self, used: dict[str, Tensors], held: set[int]) -> None:
        """`held`: the ids of each W and gamma that a followed optimizer holds."""
        for name, (effective, orig, gamma, *_others) in used.items():
            if not orig.requires_grad and not (gamma is not None and gamma.requires_grad):
                raise UserError(
                    f"{name} has gradients, but its W and gamma are frozen: unfreeze the module, which has all three, "
                    "not a list of parameters made before pc.precondition"
                )
            if self._hooks and orig.requires_grad and id(orig) not in held:
                raise UserError(f"{name} was unfrozen; call preconditioner.follow(optimizer) first")
            if effective.grad is not None and effective.grad.requires_grad:
                raise UserError(
                    f"the gradient of {name} has a graph, by backward(create_graph=True), but that of W can have none: methods "
                    "of second order cannot train weights with PC"
                )
        gradients: list[Any] = [one.effective.grad for one in used.values()]
        found = self._step.pull_back(used, gradients)
        self.clear_gradients()
        for one, of_both in zip(used.values(), found, strict=True):
            for parameter, gradient in zip((one.orig, one.gamma), of_both, strict=True):
                if parameter is not None and parameter.requires_grad:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Drop the gradients of PC(W), also for an optimizer's `zero_grad(set_to_none=False)`."""
        for weight in self.weights.values():
            gradient: Any = weight.effective.grad
            weight.effective.grad = gradient.zero_() if self._keeps_gradients and gradient is not None else None

    @torch.no_grad()
    def write_pc(self) -> None:
        """Advance u and v and write PC(W). Call it after W was changed, and if no optimizer is followed, after each step.

        Raises:
            UserError: `weight` was changed but W was not, or a weight is not where it was.
        """
        with self._lock:
            self._find_changes()
            self._write(advance=True, share=False)

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
            worst = self._step.write({name: weight.tensors() for name, weight in self.weights.items()}, advance, share)
        except BaseException:  # also Ctrl-C in a notebook: W is whole, and the next write starts from it
            self._set(self._state._replace(phase=Phase.MOVED))
            raise
        self._worst = worst if self._worst is None else torch.maximum(self._worst, worst)
        self._set(self._state._replace(phase=Phase.PULLED_BACK if self._state.waiting else Phase.WRITTEN))

    # --- steps of optimizers

    def has_gradients(self) -> bool:
        """Whether there are gradients of PC(W); if they stay allocated, whether there may be."""
        is_pulled_back = self._keeps_gradients and self._state.phase is not Phase.WRITTEN
        return not is_pulled_back and any(weight.effective.grad is not None for weight in self.weights.values())

    @torch.compiler.disable
    def before_walk(self) -> None:
        """Called before iterating over the parameters of an optimizer's group. A closure may clip gradients there."""
        if self._runs_closure and self.has_gradients():
            self.pull_back(set_to_none=not self._keeps_gradients)
        if not (self._is_saving or self._keeps_gradients) and self.has_gradients():
            raise UserError(NOT_PULLED_BACK)

    @torch.compiler.disable
    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._find_changes()  # by others, such as a load; after the step W has changed anyway
        _, *given = args  # the optimizer is the first
        closure = kwargs.get("closure", given[0] if given else None)
        waits = optimizer in self._state.waiting
        self._state = self._state._replace(stepping=None)
        if closure is None and self.has_gradients():
            raise UserError(NOT_PULLED_BACK)
        self._begin(optimizer)
        if closure is None:
            return None

        def with_pc() -> Any:
            return self._run_closure(closure, optimizer, waits)

        if given:
            return (optimizer, with_pc, *given[1:]), kwargs
        return args, {**kwargs, "closure": with_pc}

    def _begin(self, optimizer: Optimizer) -> None:
        """Note that it is stepping, if this may move W or gamma: asked before the step, which may clear gradients."""
        phase, waiting, _ = self._state
        if not any(p.grad is not None for weight in self.weights.values() for p in weight.trained):
            return
        if optimizer not in waiting:  # no pull back since its last step: only what is left of gradients may move W
            waiting = frozenset(self._holders())
            if optimizer not in waiting or not has_rate(optimizer):
                return
        self._state = State(phase, waiting, optimizer)
        self._moves.before_step(optimizer)

    def _run_closure(self, closure: Any, optimizer: Optimizer, waits: bool) -> Any:
        """`closure` with PC(W) of what W is now, and with gradients pulled back.

        Args:
            waits: whether the optimizer has yet to step since the last pull back.
        """
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
        finally:
            self._runs_closure = False
        if self.has_gradients():
            self.pull_back(set_to_none=not self._keeps_gradients)
        if optimizer in waiting:
            self._state = self._state._replace(waiting=waiting)
        self._begin(optimizer)
        return loss

    @torch.compiler.disable
    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        phase, waiting, stepping = self._state
        if stepping is not optimizer:
            self._noted = self._versions()
            return
        wrong = self._moves.after_step(optimizer)
        # it stays `stepping`, because a subclass may move W after its parent's step, which has hooks of its own
        self._state = State(phase, waiting - {optimizer}, optimizer)
        if self._state.waiting:
            self._set(self._state._replace(phase=Phase.MOVED))
        else:
            self._write(advance=True, share=True)
        if wrong:
            raise UserError(wrong)

    def _holders(self) -> dict[Optimizer, set[int]]:
        """The followed optimizers that hold a W or gamma now, with the ids of those; they may get others later."""
        ours = {id(p) for weight in self.weights.values() for p in weight.trained}
        groups = {one: one.param_groups for one in self._hooks}
        # [:] makes a plain list, without the check of `Parameters`
        held = {one: ours & {id(p) for group in of_one for p in group["params"][:]} for one, of_one in groups.items()}
        return {one: ids for one, ids in held.items() if ids}

    # --- what else changes W

    def note_loaded(self) -> None:
        """Call it when all tensors of all weights were loaded: `weight` then counts as PC(W) of W."""
        self._step.forget()
        self._set(State(Phase.WRITTEN))

    def _end(self) -> None:
        self._state = State(Phase.ENDED)

    def _note_followed(self) -> None:
        """After other optimizers are followed: who has yet to step in the step that has begun."""
        self._moves.start_again()
        phase, waiting, _ = self._state
        followed = self._holders().keys()
        self._state = State(phase, frozenset(followed if phase is Phase.PULLED_BACK else waiting & followed))

    @contextlib.contextmanager
    def exchange(self, looks: bool) -> Iterator[None]:
        """Around `eval` or `train` of a schedule-free optimizer, which exchange W for its average, or do nothing: if they did,
        PC(W) is written. `looks`: by W's values, which waits for the device; else by version counters."""
        with self._lock:
            self._find_changes()  # by others
            before = self._moves.prints() if looks else None
            yield
            if before is None:
                return self.write_if_stale()
            has_moved = (before != self._moves.prints()).any()[None]
            if on_any_rank(has_moved, [w.orig for w in self.weights.values()]).any():
                self._write(advance=True, share=False)
            else:
                self._noted = self._versions()

    def _versions(self) -> list[list[Any]]:
        """For each weight, numbers that change when PC(W), when W or gamma, and when u is written to."""
        found = []
        for weight in self.weights.values():
            effective, orig, gamma, u, _ = weight.tensors()
            tensors = [effective, u, orig] if gamma is None else [effective, u, orig, gamma]
            # a DTensor has two counters: of autograd's operations, and of those on its shard
            (shards,) = shards_of([tensors])
            of_pc, of_u, *trained = [(one._version, shard._version) for one, shard in zip(tensors, shards, strict=True)]
            found.append([of_pc, trained, of_u])
        return found

    def _find_changes(self) -> None:
        """Find by version counters which of `weight`, W with gamma, and u have changed since they were noted, and draw the
        conclusion:

            all three                  a state was loaded, if `weight` is PC(W); else somebody has changed W
            W or gamma, not `weight`   somebody changed it, so PC(W) is older
            `weight`, but not all      an error, unless PC(W) is older and will be written anyway

        Neither fused optimizers nor changes through `.data` move the counters: `pc.moved` finds them by values, a step later.
        Hooks see the steps of those that are followed.

        Raises:
            UserError: PC(W) alone has changed, a weight is not where it was, or the model has no PC any more.
        """
        if self._state.phase is Phase.ENDED:
            raise UserError(ENDED)
        changes = [
            [a != b for a, b in zip(*both, strict=True)] for both in zip(self._versions(), self._noted, strict=True)
        ]
        if not any(map(any, changes)):
            return
        require_in_place(self.weights.values(), self._models)
        for weight, (effective, trained, u) in zip(self.weights.values(), changes, strict=True):
            if effective and not (trained and u) and self._state.phase is not Phase.MOVED:
                raise UserError(
                    f"{weight.name} was changed while it held PC(W), and optimizers train W: change {weight.attribute}_orig "
                    "and call preconditioner.write_pc(); after loading plain weights, call preconditioner.restart(); after "
                    "swapping averages back, preconditioner.note_loaded(); and give pc.precondition all optimizers"
                )
        if any(map(all, changes)) and self._step.has_written(
            {name: weight.tensors() for name, weight in self.weights.items()}
        ):
            self._set(State(Phase.WRITTEN) if all(map(all, changes)) else self._state)
        elif any(trained for _, trained, _ in changes):
            self._state = self._state._replace(phase=Phase.MOVED)
        self._noted = self._versions()


def has_rate(optimizer: Optimizer) -> bool:
    """Whether any rate is not 0. torch.distributed.checkpoint takes steps at rate 0, only to create optimizer state."""
    return any(group.get("lr") != 0 for group in optimizer.param_groups)
