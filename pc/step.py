"""Schedule "step": compute PC(W) once per optimizer step, because the weights change only then.

Between steps a weight *is* PC(W), so forward and backward passes are those of a plain model, for any number of
micro-batches and any parallelism. `pull_back` is linear in the gradient, so one call on the accumulated gradient equals
the sum of the backward passes of schedule "forward". Both passes need full matrices; `pc.owner` gathers each on one
rank.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pc import passes
from pc.cuts import Form
from pc.errors import UserError
from pc.owner import Item, Plan, local, shard_like
from pc.schedules import MESSAGES, PC, PULLED, RAW, Schedule, State, require_real
from pc.spectral import without_autocast
from pc.weights import Weight

# How far the norm of a shard may be from that of the PC(W) that was written: rounding; after a load also the matmuls of
# another machine.
UNCHANGED, UNCHANGED_AFTER_LOAD = 1e-6, 1e-3


class StepSchedule(Schedule):
    """Stores W and switches the weights between W and PC(W)."""

    saved = ("raw", "gamma", "u", "v")

    def __init__(self, models: list[nn.Module], marks: dict[str, Weight]) -> None:
        self._fsdp_modules = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
        # Parameters are read once, here, and must be the sharded ones. After a forward pass without gradients FSDP may
        # still hold unsharded ones.
        self._reshard()
        self._plans: dict[tuple, Plan] = {}
        self._pulled_back: Tensor | None = None
        self._norms: Tensor | None = None
        self._comparisons: list[tuple[Tensor, torch.Event | None]] = []
        self._tolerance = UNCHANGED
        super().__init__(models, marks)
        self._observe()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_plans": {}, "_comparisons": []}  # they hold process groups and events

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._observe()

    def _observe(self) -> None:
        def note_backward(_: Tensor) -> None:
            if self.phase == PULLED:
                self.phase = PC

        for state in self.weights.values():
            if state.weight.requires_grad:
                state.weight.register_post_accumulate_grad_hook(note_backward)

    @torch.no_grad()
    def state_of(self, mark: Weight) -> State:
        require_real(mark)
        weight = mark.parameter
        if weight.dtype.itemsize < 4:
            raise UserError(
                f"{mark.name} is {weight.dtype}, but W needs float32 to accumulate small updates; call model.float(), "
                "and use autocast or FSDP's mixed precision for fast matmuls"
            )
        if mark.gamma is not None:
            if mark.gamma.is_meta:  # plain weights were assigned to a model on the meta device
                gamma = torch.empty(mark.gamma.shape, device=weight.device, dtype=weight.dtype)
                setattr(mark.module, mark.gamma_key, nn.Parameter(gamma))
            mark.gamma.fill_(1.0)
        vectors = mark.vectors or mark.form.initial_vectors(mark.name)
        u, v = (shard_like(weight, vector.to(weight.device, weight.dtype), bool(mark.form.stack)) for vector in vectors)
        return State(mark, weight, mark.gamma, weight.detach().clone(), u, v)

    @torch.no_grad()
    def materialise(self) -> None:
        """Save W from the weights, advance `u` and `v`, and write PC(W) into the weights.

        Raises:
            UserError: the weights already hold PC(W).
        """
        self._require("materialise")
        self._reshard()
        states = self.weights.values()
        torch._foreach_copy_([local(s.raw) for s in states], [local(s.weight) for s in states])
        self._write_pc(_materialise)
        self._tolerance = UNCHANGED

    def _write_pc(self, function: Callable) -> None:
        states = list(self.weights.values())
        inputs = [(s.raw, *s.gammas, s.u, s.v) for s in states]
        self._run("materialise", function, states, inputs, [(s.weight, s.u, s.v) for s in states])
        self._norms = self._measure()
        self._set_phase(PC)

    @torch.no_grad()
    def pull_back(self) -> None:
        """Replace the gradient of PC(W) in `weight.grad` by that of W, and set `gamma.grad`.

        Call it once per step, after the last backward pass and before clipping.

        Raises:
            UserError: the weights hold W, there are no gradients, or they are already pulled back.
        """
        self._require("pull_back")
        self._require_unchanged()  # in earlier steps
        self._compare()
        trained = {name: s for name, s in self.weights.items() if any(p.requires_grad for p in (s.weight, *s.gammas))}
        without = [name for name, s in trained.items() if s.weight.grad is None]
        if without and (len(without) == len(trained) or isinstance(trained[without[0]].weight, DTensor)):
            raise UserError(
                f"pull_back() found no gradient on {without[0]}.weight; call it after backward() (a frozen weight "
                "needs a frozen gamma; under FSDP every layer must have been used)"
            )
        used = [s for s in trained.values() if s.weight.grad is not None]
        if self._is_pulled_back(used):
            raise UserError(MESSAGES["pull_back", PULLED])
        gradients = [(s.weight.grad, *(torch.zeros_like(gamma) for gamma in s.gammas)) for s in used]
        inputs = [(s.raw, g, *s.gammas, s.u, s.v) for s, (g, *_) in zip(used, gradients, strict=True)]
        self._run("pull_back", _pull_back, used, inputs, gradients)
        for state, given in zip(used, gradients, strict=True):
            for parameter, gradient in zip((state.weight, *state.gammas), given, strict=True):
                parameter.grad = gradient if parameter.requires_grad else None
            self._pulled_back = state.weight.grad
        self.phase = PULLED

    def _is_pulled_back(self, states: list[State]) -> bool:
        """Whether zero_grad() is missing since `pull_back`, the only one that gives gammas a gradient."""
        gammas = [gamma for state in states for gamma in state.gammas if gamma.requires_grad]
        if not gammas:
            return any(state.weight.grad is self._pulled_back for state in states)
        given = [local(gamma.grad).flatten() for gamma in gammas if gamma.grad is not None]
        return bool(given) and not given[0].is_meta and bool(torch.cat(given).any())

    def _begin(self, has_closure: bool) -> bool:
        if has_closure:
            raise UserError(
                'step(closure) computes gradients while the weights hold W; in schedule "step" call backward() and '
                'schedule.pull_back() before optimizer.step(), or use schedule="forward"'
            )
        if self.phase == PC and not self._has_gradients():
            return False  # no weight with PC changes
        if self.phase != RAW:
            self.restore_raw()
        return True

    @torch.no_grad()
    def restore_raw(self) -> None:
        """Write W into the weights, so that the optimizer steps and decays W.

        Raises:
            UserError: the weights already hold W, there are gradients of PC(W), or a weight is no longer PC(W).
        """
        if self.phase == RAW or self._has_gradients():
            self._require("restore_raw")
        self._compare()
        if next(iter(self.weights.values())).weight.device.type == "cpu":  # an accelerator's answer comes a step later
            self._require_unchanged()
        self._reshard()
        states = self.weights.values()
        torch._foreach_copy_([local(s.weight) for s in states], [local(s.raw) for s in states])
        self._set_phase(RAW)

    def _has_gradients(self) -> bool:
        return any(s.weight.grad is not None for s in self.weights.values())

    def _use_loaded(self) -> None:
        """Compute PC(W) anew, so that the order of loading model and schedule does not matter."""
        self._reshard()
        self._write_pc(_materialise_as_saved)
        self._tolerance = UNCHANGED_AFTER_LOAD

    def _run(self, name: str, function: Callable, states: list[State], inputs: list[Item], outputs: list[Item]) -> None:
        key = (name, *(s.mark.name for s in states))
        if key not in self._plans:
            forms = [s.form for s in states]
            stacked, costs = [bool(form.stack) for form in forms], [form.cost for form in forms]
            self._plans[key] = Plan(inputs, outputs, keys=forms, stacked=stacked, costs=costs)
        with without_autocast(states[0].raw):
            self._plans[key].run(function, inputs, outputs)

    def _measure(self) -> Tensor | None:
        """Norms of the local shards, [weights]."""
        shards = [local(s.weight) for s in self.weights.values()]
        return None if shards[0].is_meta else torch.stack(torch._foreach_norm(shards))

    def _compare(self) -> None:
        """Note, on all ranks, whether a weight was changed on one since PC(W) was written into it."""
        if self._norms is None:
            return
        same = torch.isclose(self._measure(), self._norms, rtol=self._tolerance, atol=0.0, equal_nan=True)
        changed = (~same).any().float()
        for state in self.weights.values():
            if isinstance(state.weight, DTensor):
                mesh = state.weight.device_mesh
                for dimension in range(mesh.ndim):
                    dist.all_reduce(changed, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
                break
        event = None
        if changed.device.type != "cpu" and torch.accelerator.is_available():
            event = torch.Event(changed.device)
            event.record()
        self._comparisons.append((changed, event))

    def _require_unchanged(self) -> None:
        """Raise if a weight was changed: its gradients are not those of PC(W), and the change would be lost."""
        found = False
        for changed, event in self._comparisons:
            if event is None:
                found |= bool(changed)
                continue
            stream = torch.Stream(changed.device)  # one that does not wait for the step in progress
            stream.wait_event(event)
            with stream:
                found |= bool(changed)
        self._comparisons.clear()
        if found:
            raise UserError(
                "a weight was changed while it held PC(W), and the optimizer steps W: load the schedule's state with "
                "the model's, swap averaged weights back, create pc.schedule after initialisation and DDP, give it all "
                "optimizers, and change weights between restore_raw() and materialise()"
            )

    def _reshard(self) -> None:
        # While FSDP holds the unsharded parameter, a write to the shard has no effect.
        for module in self._fsdp_modules:
            module.reshard()


def _materialise(form: Form, raw: Tensor, *rest: Tensor, iterate: bool = True) -> Sequence[Tensor]:
    kinds = "wguv" if len(rest) == 3 else "wuv"
    return form.apply(partial(passes.materialise, iterate=iterate), kinds, (raw, *rest), "wuv")


_materialise_as_saved = partial(_materialise, iterate=False)


def _pull_back(form: Form, raw: Tensor, gradient: Tensor, *rest: Tensor) -> Sequence[Tensor]:
    kinds, results = ("wwguv", "wg") if len(rest) == 3 else ("wwuv", "w")
    return form.apply(passes.pull_back, kinds, (raw, gradient, *rest), results)
