"""`schedule` makes either schedule. Schedule "step", here, computes PC(W) once per optimizer step, because the weights
change only then.

Between steps a weight *is* PC(W), so forward and backward passes are those of a plain model, for any number of
micro-batches and any parallelism. `pull_back` is linear in the gradient, so one call on the accumulated gradient equals
the sum of the backward passes of schedule "forward". Both passes need full matrices; `pc.owner` gathers each on one
rank.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pc import passes
from pc.cuts import Form
from pc.errors import UserError
from pc.owner import Item, Plan
from pc.schedules import PC, PULLED, RAW, TWICE, Schedule
from pc.shards import local, shard_like
from pc.spectral import without_autocast
from pc.weights import NO_SCHEDULE, Weight, clean_name, named_weights

# How far the norm of a shard may be from that of the PC(W) that was written, relative to it: rounding.
UNCHANGED = 1e-6


def schedule(models: nn.Module | Iterable[nn.Module], *optimizers: Optimizer) -> Schedule:
    """The schedule that `PCConfig.schedule` names, for models after `pc.attach`.

    Args:
        models: the model, or a list of its parts on this rank under pipeline parallelism; after sharding, with weights
            off the meta device.
        optimizers: all that train the model. The schedule follows them from now on (`follow`), and the model is ready.
            Without optimizers, call `materialise` before the first forward pass, once the weights are initialised or
            loaded, unless a state is loaded; and `follow` later, or `restore_raw` and `materialise` around each step.

    A copy of the model alone can be evaluated, but not trained. To train a copy, copy all three together:
    `copy.deepcopy((model, optimizer, schedule))`.

    Raises:
        UserError: no weight is marked, or one is on the meta device, is below float32, is shared, or has a schedule
            already; those of `follow`.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    weights = [weight for model in models for _, weight in named_weights(model)]
    if not weights:
        raise UserError("pc.schedule found no weight with PC; call pc.attach(model, pc.PCConfig(...)) first")
    _require_usable(models, weights)
    kind = StepSchedule if weights[0].config.schedule == "step" else Schedule
    made = kind(models, {weight.name: weight for weight in weights})
    if optimizers:
        made.follow(*optimizers)
        made.materialise()
    return made


def _require_usable(models: list[nn.Module], weights: list[Weight]) -> None:
    holders: dict[int, list[str]] = {}
    for model in models:
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(clean_name(name))
    for weight in weights:
        if len(sharing := holders[id(weight.parameter)]) > 1:
            raise UserError(f"{weight.name} shares its weight: {', '.join(sharing)}; PC needs a separate weight")
        if [other.name for other in weights].count(weight.name) > 1:
            raise UserError(f"two models have a weight {weight.name} with PC; give each model its own pc.schedule")
        if weight.missing != NO_SCHEDULE:
            raise UserError(
                f"{weight.name} has a schedule already, which holds its W; use that one. To copy a model: "
                "copy.deepcopy((model, optimizer, schedule)). To start again from PC(W): pc.merge, then pc.attach"
            )


class StepSchedule(Schedule):
    """Stores W and switches the weights between W and PC(W)."""

    saved = ("raw", "gamma", "u", "v")

    def __init__(self, models: list[nn.Module], weights: dict[str, Weight]) -> None:
        self._fsdp_modules = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
        # Parameters are read once, here, and must be the sharded ones. After a forward pass without gradients FSDP may
        # still hold unsharded ones.
        self._reshard()
        self._plans: dict[tuple, Plan] = {}
        self._norms: Tensor | None = None
        """of the local shards when PC(W) was written, [weights]; None: not to be compared"""
        self._answer: tuple[Tensor, torch.Event] | None = None
        """an accelerator's last one, and its arrival; None: there is none to read"""
        super().__init__(models, weights)
        self._observe()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_plans": {}, "_answer": None}  # they hold process groups and events

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._observe()

    def _observe(self) -> None:
        def note_backward(_: Tensor) -> None:
            if self.phase == PULLED:
                self.phase = PC

        for weight in self.weights.values():
            if weight.parameter.requires_grad:
                weight.parameter.register_post_accumulate_grad_hook(note_backward)

    @torch.no_grad()
    def start(self, weight: Weight) -> None:
        if weight.gamma is not None and weight.gamma.is_meta:  # plain weights were assigned to a model on meta
            weight.add_gamma()
        parameter = weight.parameter
        for gamma in weight.gammas:
            gamma.fill_(1.0)
        given = weight.form.initial_vectors(weight.name) if weight.u is None else (weight.u, weight.v)
        vectors = (vector.to(parameter.device, parameter.dtype) for vector in given)
        weight.u, weight.v = (shard_like(parameter, vector) for vector in vectors)
        weight.raw = parameter.detach().clone()

    @torch.no_grad()
    def materialise(self) -> None:
        """Save W from the weights, advance `u` and `v`, and write PC(W) into the weights.

        Raises:
            UserError: the weights already hold PC(W).
        """
        self._require("materialise")
        weights = self.weights.values()
        torch._foreach_copy_([local(w.raw) for w in weights], [local(w.parameter) for w in weights])
        self._write_pc(iterate=True)
        self._norms = self._measure()

    def _use_loaded(self) -> None:
        """Compute PC(W) anew, so that the order of loading model and schedule does not matter."""
        self._write_pc(iterate=False)
        # the model's state, loaded after this one, may have other rounding errors; what was noted before is gone
        self._norms = self._answer = None

    def _write_pc(self, iterate: bool) -> None:
        self._reshard()
        weights = list(self.weights.values())
        inputs = [(w.raw, *w.gammas, w.u, w.v) for w in weights]
        outputs: list[Item] = [(w.parameter, w.u, w.v) for w in weights]
        self._run(partial(passes.materialise, iterate=iterate), "", "wuv", weights, inputs, outputs)
        self._set_phase(PC)

    @torch.no_grad()
    def pull_back(self) -> None:
        """Replace the gradient of PC(W) in `weight.grad` by that of W, and set `gamma.grad`.

        Call it once per step, after the last backward pass and before clipping.

        Raises:
            UserError: the weights hold W or were changed, there are no gradients, or they are already pulled back.
        """
        self._require("pull_back")
        self._require_unchanged()
        used = [w for w in self.weights.values() if w.parameter.grad is not None]
        if not used:
            raise UserError("pull_back() found no gradient of a weight with PC; call it after backward()")
        # Only `pull_back` gives gammas a gradient, and zero_grad() takes it away or makes it zero.
        earlier = [local(gamma.grad).flatten() for w in used for gamma in w.gammas if gamma.grad is not None]
        if earlier and torch.cat(earlier).any():
            raise UserError(TWICE)
        gradients: list[Any] = [(w.parameter.grad, *(torch.zeros_like(gamma) for gamma in w.gammas)) for w in used]
        inputs = [(w.raw, g, *w.gammas, w.u, w.v) for w, (g, *_) in zip(used, gradients, strict=True)]
        self._run(passes.pull_back, "w", "wg", used, inputs, gradients)
        for weight, given in zip(used, gradients, strict=True):
            for parameter, gradient in zip((weight.parameter, *weight.gammas), given, strict=True):
                parameter.grad = gradient if parameter.requires_grad else None
        self.phase = PULLED

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
            UserError: the weights already hold W or were changed, or there are gradients of PC(W).
        """
        if self.phase == RAW or self._has_gradients():
            self._require("restore_raw")
        self._require_unchanged()
        self._reshard()
        weights = self.weights.values()
        torch._foreach_copy_([local(w.parameter) for w in weights], [local(w.raw) for w in weights])
        self._set_phase(RAW)

    def _has_gradients(self) -> bool:
        return any(w.parameter.grad is not None for w in self.weights.values())

    def _run(
        self, function: Callable, first: str, results: str, weights: list[Weight], inputs: list, outputs: list
    ) -> None:
        """A function of `pc.passes` on the owners.

        Args:
            first, results: kinds (`Form.shape_of`) of the inputs before those that make PC(W), and of the results.
        """
        key = (results, *(w.name for w in weights))
        if key not in self._plans:
            forms = [w.form for w in weights]
            self._plans[key] = Plan(inputs, outputs, keys=forms, costs=[form.cost for form in forms])

        def of_weights(form: Form, *tensors: Tensor) -> tuple[Tensor, ...]:
            return form.apply(function, first + form.kinds, tensors, results)

        with without_autocast(weights[0].raw):
            self._plans[key].run(of_weights, inputs, outputs)

    def _measure(self) -> Tensor:
        """Norms of the local shards, [weights]."""
        return torch.stack(torch._foreach_norm([local(w.parameter) for w in self.weights.values()]))

    def _require_unchanged(self) -> None:
        """Raise on all ranks if on any a weight is not the PC(W) that was written into it: its gradients are not those of
        PC(W), and the change would be lost."""
        if self._norms is None or self._norms.is_meta:
            return
        same = torch.isclose(self._measure(), self._norms, rtol=UNCHANGED, atol=0.0, equal_nan=True)
        changed = (~same).any().float()
        meshes = [w.parameter.device_mesh for w in self.weights.values() if isinstance(w.parameter, DTensor)]
        for dimension in range(meshes[0].ndim if meshes else 0):
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=meshes[0].get_group(dimension))
        if self._is_true(changed):
            self._answer = None
            raise UserError(
                "a weight was changed while it held PC(W), and the optimizer steps W: load the schedule's state with "
                "the model's, swap averaged weights back, create pc.schedule after initialisation and DDP, give it all "
                "optimizers, and change weights between restore_raw() and materialise()"
            )

    def _is_true(self, flag: Tensor) -> bool:
        """An accelerator's flag is read one call later, when it has long arrived, so that the host can run ahead."""
        if flag.device.type == "cpu":
            return bool(flag)
        last, self._answer = self._answer, (flag.to("cpu", non_blocking=True), torch.Event(flag.device))
        self._answer[1].record()
        if last is None:
            return False
        answer, arrival = last
        arrival.synchronize()
        return bool(answer)

    def _reshard(self) -> None:
        # While FSDP holds the unsharded parameter, a write to the shard has no effect.
        for module in self._fsdp_modules:
            module.reshard()
