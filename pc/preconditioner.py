"""PC once per optimizer step, because the weights change only then.

`weight` is PC(W), so forward and backward passes are those of a plain model, for any number of micro-batches and any
parallelism. The attribute that holds a gradient says what it is the gradient of:

    backward()             weight.grad: of PC(W)
    pull_back()            weight.grad becomes weight_orig.grad and weight_gamma.grad: a vector-Jacobian product
    optimizer.step()       moves W = weight_orig and gamma
    after it               u and v advance, and PC(W) is written into weight

`pull_back` is linear in the gradient, so one call on the accumulated gradient equals the sum of the backward passes of
`pc.PCLinear`. Both passes need full matrices; `pc.owner` gathers each on one rank.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pc import followed
from pc.errors import UserError
from pc.guard import COPIED_EARLY, Guard, remove_guards
from pc.owner import Item, Plan, RecentPlans
from pc.shards import local, viewed
from pc.spectral import without_autocast
from pc.splits import Kept, WeightSplit
from pc.targets import counted, wildcard_layers
from pc.weight import Weight, named_weights, require_precision

# The most that a rank keeps from write_pc() to pull_back(); it recomputes the rest. Both need more while they run.
KEPT_BYTES = 256 * 2**20

NOT_PULLED_BACK = (
    "there are gradients of PC(W): preconditioner.pull_back(), which turns them into those of W, was not called after the "
    "last backward(); call it before gradients are unscaled, clipped or measured, and before optimizer.step()"
)


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


class Preconditioner:
    """Writes PC(W) and pulls gradients back; `pc.precondition` makes it.

    Attributes:
        weights: by name.
    """

    def __init__(self, models: list[nn.Module], process_group: dist.ProcessGroup | None = None) -> None:
        modules = [module for model in models for module in model.modules()]
        self._models = models
        self._fsdp_modules = [module for module in modules if isinstance(module, FSDPModule)]
        self._ddp_modules = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._sharing = process_group or next((module.process_group for module in self._ddp_modules), None)
        """ranks that have the same plain weights, and share the work"""
        self.weights: dict[str, Weight] = {name: w for model in models for name, w in named_weights(model)}
        self._plans = RecentPlans()
        self._kept: dict[tuple, Kept] = {}
        """what the last write kept for `pull_back`, by the matrices of a batch"""
        self._hooks: dict[Optimizer, list[RemovableHandle]] = {}
        """by followed optimizer"""
        self._has_ended = False
        self._stepped: set[Optimizer] = set()
        """followed optimizers that have moved W or gamma since the last time all had"""
        self._replaced: dict[tuple, Tensor] = {}
        """by the matrices of a batch: how often their u and v were replaced, on the device"""
        self._estimates: Tensor | None = None
        """for `take_estimates`: the sum of the counts, and the largest ratio, in the `estimates` of `WeightSplit.write`"""
        self._is_pulled_back = False
        """whether gradients were pulled back since PC(W) was written"""
        self._is_stale = False
        """whether PC(W) is known to be older than W or gamma"""
        self._moves = False
        """whether the step that is being taken may move W or gamma"""
        self._lock = threading.RLock()  # a thread may evaluate while a step is taken
        self._is_saving = False
        """whether an optimizer's state dict is being made, which may happen between micro-batches"""
        for model in models:
            model._ddp_params_and_buffers_to_ignore = NotForDDP()  # type: ignore[assignment]
        _live.add(self)
        watch = register_optimizer_step_pre_hook(partial(_require_w, weakref.ref(self)))
        self._stop_watching = weakref.finalize(self, watch.remove)
        for weight in self.weights.values():
            if weight.orig is None:
                weight.start()
        self._note_versions()
        if remove_guards(modules):  # `pc.attach` puts them on weights that do not hold PC(W)
            self._write(advance=True, share=True)

    def __reduce__(self):
        raise UserError(
            "a preconditioner cannot be copied or saved: use copy.deepcopy((model, optimizer)), and give the copies to "
            "pc.precondition; it has no state beyond theirs"
        )

    def __repr__(self) -> str:
        lines = [f"{wildcard_layers(name)}: {weight.split.describe()}" for name, weight in self.weights.items()]
        return "\n  ".join([f"Preconditioner of {len(lines)} weights", *counted(lines)])

    # --- once per step

    @torch.no_grad()
    def pull_back(self) -> None:
        """Turn the gradients of PC(W) in `weight.grad` into gradients of W and gamma, added to their `grad`.

        Call it after the last backward pass of a step, before unscaling and clipping; or after each that averages over ranks.

        Raises:
            UserError: there are no gradients, W or PC(W) has changed since PC(W) was written, or a weight with a
                gradient has its W in no followed optimizer.
        """
        with self._lock:
            self._take_note_of_changes()
            if self._is_stale:
                raise UserError(
                    "W is newer than PC(W), which the last forward pass used: an optimizer did not step, or W was changed; "
                    "call preconditioner.write_pc() before the forward pass; for an optimizer made later, "
                    "call preconditioner.follow(optimizer)"
                )
            if not all(ddp.require_backward_grad_sync for ddp in self._ddp_modules):
                raise UserError("pull_back() within no_sync(): call it after the backward pass that averages gradients")
            used = [weight for weight in self.weights.values() if weight.effective.grad is not None]
            if len(used) < len(self.weights):  # another parameter may have got the weight's place and gradient
                self._require_in_place()
            if not used:
                if not any(weight.effective.requires_grad for weight in self.weights.values()):
                    return
                raise UserError("pull_back() found no gradient of a weight with PC; call it after backward()")
            held = followed.ids_of_parameters(*self._hooks) if self._hooks else {id(w.orig) for w in used}
            for weight in used:
                require_precision(weight)
                if not any(parameter.requires_grad for parameter in weight.trained):
                    raise UserError(
                        f"{weight.name} has gradients, but its W and gamma are frozen: unfreeze the module, which has all three, "
                        "not a list of parameters made before pc.precondition"
                    )
                if weight.orig.requires_grad and id(weight.orig) not in held:
                    raise UserError(f"{weight.name} was unfrozen; call preconditioner.follow(optimizer) first")
            inputs: list[Item] = []
            outputs: list[Item] = []
            for weight in used:
                gradient: Any = weight.effective.grad  # perhaps a view of DDP's bucket, so it is not written to
                inputs.append((weight.orig, gradient, weight.gamma_values, weight.u, weight.v))
                outputs.append((torch.empty_like(gradient), torch.empty_like(weight.gamma_values)))
            self._run("pull back", self._pull_back_batch, used, inputs, outputs)
            for weight, (gradient, gamma_gradient) in zip(used, outputs, strict=True):
                weight.effective.grad = None
                _add_gradient(weight.orig, gradient)
                _add_gradient(weight.gamma, viewed(gamma_gradient, (gamma_gradient.numel(),)))
            self._is_pulled_back = True

    @torch.no_grad()
    def write_pc(self) -> None:
        """Advance u and v and write PC(W). Call it after W was changed, and if no optimizer is followed, after each step.

        Raises:
            UserError: `weight` was changed but W was not, or a weight is not where it was.
        """
        with self._lock:
            self._take_note_of_changes()
            self._write(advance=True, share=False)

    def write_if_stale(self) -> None:
        """`write_pc`, if W is known to be newer than PC(W). If weights are not sharded, one rank may call it alone."""
        with self._lock:
            self._take_note_of_changes()
            if self._is_stale:
                self._write(advance=True, share=False)

    def require_loaded(self) -> None:
        """After a load that skips missing tensors: raise a `UserError` if any tensor of a weight was not loaded."""
        now = [_versions(weight) for weight in self.weights.values()]
        for name, *both in zip(self.weights, now, self._versions, strict=True):
            if any(new == old for new, old in zip(*both, strict=True)):
                raise UserError(f"{name} was not loaded with its W, gamma, u and v")

    def note_loaded(self) -> None:
        """Call it when all tensors of all weights were loaded: `weight` then counts as PC(W) of W."""
        self._kept.clear()
        self._is_stale = False
        self._stepped.clear()
        self._note_versions()
        remove_guards(self._guarded())

    def replaced(self) -> dict[str, int]:
        """How often u and v were replaced because the largest singular value was underestimated
        (`pc.spectral.second_opinion`), by weight, for those that this rank computes. Waits for the device."""
        counts = torch.stack([*self._replaced.values()]).tolist() if self._replaced else []
        by_name = Counter[str]()
        for (_, *matrices), count in zip(self._replaced, counts, strict=True):
            by_name[", ".join(dict.fromkeys(name for name, _ in matrices))] += int(count)
        return {name: count for name, count in by_name.items() if count}

    def take_estimates(self) -> Tensor:
        """What second starts on this rank have found since the last call, [2]. Does not wait for the device.

        First how often they replaced u and v. Then the largest ratio of what they found to the estimate u^T W v.
        """
        if self._estimates is None:  # this rank computes no matrix, or has written nothing since
            return local(next(iter(self.weights.values())).orig).new_zeros(2)
        taken, self._estimates = self._estimates, None
        return taken

    def restart(self) -> None:
        """Take the current weights as W, with gamma 1 and new u and v. Call it after plain weights were loaded."""
        with self._lock:
            self._require_pc()
            for weight in self.weights.values():
                weight.start()
            self._write(advance=True, share=False)

    @torch.inference_mode(False)  # as `pc.precondition`; an evaluation may write
    def _write(self, advance: bool, share: bool) -> None:
        """`share`: all ranks call this now, so that those with equal whole weights may divide the matrices among them."""
        self._require_in_place()
        weights = list(self.weights.values())
        for weight in weights:
            require_precision(weight)
        inputs = [(w.orig, w.gamma_values, w.u, w.v) for w in weights]
        outputs: list[Item] = [(w.effective, w.u, w.v) for w in weights]
        self._kept.clear()

        def write(matrices: tuple, split: WeightSplit, *tensors: Tensor) -> Sequence[Tensor]:
            *results, estimates, kept = split.write(*tensors, advance=advance)
            count, largest = estimates.unbind()
            self._replaced[matrices] = self._replaced[matrices] + count if matrices in self._replaced else count
            if self._estimates is None:
                self._estimates = torch.zeros_like(estimates)
            self._estimates[0].add_(count)
            torch.maximum(self._estimates[1], largest, out=self._estimates[1])
            if sum(map(_bytes, self._kept.values())) + _bytes(kept) <= KEPT_BYTES:
                self._kept[matrices] = kept
            return results

        try:
            self._run("write", write, weights, inputs, outputs, share)
        except BaseException:  # also Ctrl-C in a notebook: W is whole, and the next write starts from it
            self._wait_for_write()
            raise
        self._is_pulled_back = self._is_stale = False
        self._note_versions()
        remove_guards(self._guarded())

    def _pull_back_batch(self, matrices: tuple, split: WeightSplit, *tensors: Tensor) -> Sequence[Tensor]:
        return split.pull_back(*tensors, kept=self._kept.get(matrices, ()))

    def _run(
        self, name: str, function: Callable, weights: list[Weight], inputs: list, outputs: list, share: bool = True
    ) -> None:
        """Call `function(matrices, split, *tensors)` for every batch of matrices on its owner; `matrices` identifies the batch."""
        is_joining = any(ddp._join_config.enable for ddp in self._ddp_modules)  # some ranks have no batches any more
        sharing = self._sharing if share and not is_joining else None
        splits = [w.split for w in weights]
        kind = weights[0].orig.dtype, weights[0].orig.device  # `model.double()` makes new weights with the same names
        key = (name, sharing, kind, *(w.name for w in weights))
        plan = self._plans.get(key, lambda: Plan(inputs, outputs, splits, [split.cost for split in splits], sharing))
        batches = iter(plan.batches)

        def on_batch(split: WeightSplit, *tensors: Tensor) -> Sequence[Tensor]:
            matrices = kind, *((weights[item].name, index) for item, index in next(batches))
            return function(matrices, split, *tensors)

        with without_autocast(weights[0].orig):
            plan.run(on_batch, inputs, outputs)

    def _require_pc(self) -> None:
        if self._has_ended:
            raise UserError(
                "pc.merge or pc.detach has removed PC from the model of this preconditioner; to train on with PC, call "
                "pc.attach and pc.precondition again; to evaluate a plain copy, load pc.plain_state_dict(model)"
            )

    def _require_in_place(self) -> None:
        """Raise a `UserError` if a weight is not what a module of the model multiplies by."""
        for unit in self._fsdp_modules:
            unit.reshard()
        modules = {module for model in self._models for module in model.modules()}
        for weight in self.weights.values():
            if weight.module not in modules:
                raise UserError(
                    f"{weight.name} is not in the model any more: replace or remove layers before pc.attach"
                )
            if weight.module._parameters.get(weight.attribute) is not weight.effective:
                raise UserError(
                    f"{weight.name} has another {weight.attribute} than pc.precondition found: call it after DDP and "
                    "fully_shard, and not with torch's parametrize, prune, spectral_norm or weight_norm on the same weight"
                )

    # --- what changes W

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
        for earlier in [*self._hooks]:
            if self._trained_by(earlier) <= trained:  # the new ones train all of our parameters that it trains
                self._leave(earlier, restore=earlier not in given)
        for optimizer in given:
            self._hooks[optimizer] = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_state_dict_pre_hook(lambda _: setattr(self, "_is_saving", True)),
                optimizer.register_state_dict_post_hook(lambda *_: setattr(self, "_is_saving", False)),
            ]

    def leave(self) -> None:
        """Give the optimizers their parameters back, and take all hooks away; `pc.merge` and `pc.detach` call it."""
        for optimizer in [*self._hooks]:
            self._leave(optimizer)
        self._stop_watching()
        self._has_ended = True
        _live.discard(self)

    def _leave(self, optimizer: Optimizer, restore: bool = True) -> None:
        for hook in self._hooks.pop(optimizer):
            hook.remove()
        if restore:
            followed.leave(self.weights.values(), optimizer)

    def _trained_by(self, optimizer: Optimizer) -> set[int]:
        """The ids of each W and gamma that it holds now: it may get others later."""
        ours = {id(p) for weight in self.weights.values() for p in weight.trained}
        return ours & followed.ids_of_parameters(optimizer)

    def has_gradients(self) -> bool:
        """Whether there are gradients of PC(W)."""
        return any(weight.effective.grad is not None for weight in self.weights.values())

    def require_pulled_back(self) -> None:
        """Raise a `UserError` if there are gradients of PC(W)."""
        if self.has_gradients():
            raise UserError(NOT_PULLED_BACK)

    @torch.compiler.disable
    def before_walk(self) -> None:
        """Called before iterating over the parameters of an optimizer's group (`followed.Parameters`)."""
        if not self._is_saving:
            self.require_pulled_back()

    @torch.compiler.disable
    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._take_note_of_changes()  # by others, such as a load; after the step W has changed anyway
        _, *given = args  # the optimizer is the first
        closure = kwargs.get("closure", given[0] if given else None)
        self._moves = self._may_move(optimizer)
        if closure is None:
            self.require_pulled_back()
            return None

        def with_pc() -> Any:
            others_have_stepped = self._is_stale
            self._take_note_of_changes()  # by the step itself, if it calls the closure again, as LBFGS does
            if self._is_stale:
                # u and v advance, unless only others have moved W: then the end of this step advances them
                self._write(advance=not others_have_stepped or optimizer in self._stepped, share=False)
            with torch.enable_grad():
                loss = closure()
            if self.has_gradients():
                self.pull_back()
            self._moves |= self._may_move(optimizer)
            return loss

        if given:
            return (optimizer, with_pc, *given[1:]), kwargs
        return args, {**kwargs, "closure": with_pc}

    @torch.compiler.disable
    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._moves:
            self._note_versions()
            return
        self._stepped.add(optimizer)
        if not any(map(self._trained_by, self._hooks.keys() - self._stepped)):  # all that hold any have stepped
            self._stepped.clear()
            self._write(advance=True, share=True)
        else:
            self._note_versions()
            self._wait_for_write()

    def _may_move(self, optimizer: Optimizer) -> bool:
        """Whether a step may move W or gamma; with a learning rate of 0 only if gradients were pulled back before it. Asked
        before the step, which may clear the gradients."""
        if not (self._is_pulled_back or _has_rate(optimizer)) or not self._trained_by(optimizer):
            return False
        return any(p.grad is not None for weight in self.weights.values() for p in weight.trained)

    def _wait_for_write(self) -> None:
        """W is newer than PC(W): write it before the next forward pass."""
        self._is_stale = True
        Guard(COPIED_EARLY, self.write_if_stale).put_on(self._guarded())

    def _guarded(self) -> list[nn.Module]:
        """The modules that get a guard: each model, each of FSDP's units, and each module of a weight."""
        return [*dict.fromkeys((*self._models, *self._fsdp_modules, *(w.module for w in self.weights.values())))]

    def _note_versions(self) -> None:
        self._versions = [_versions(weight) for weight in self.weights.values()]

    def _take_note_of_changes(self) -> None:
        """Find by version counters which of `weight`, W with gamma, and u have changed since they were noted, and draw the
        conclusion:

            all three                  a state was loaded, so `weight` is PC(W)
            W or gamma, not `weight`   somebody changed it, so PC(W) is stale
            `weight`, but not all      an error, unless PC(W) is stale and will be written anyway

        Fused optimizers do not move the counters. Hooks see the steps of those that are followed.

        Raises:
            UserError: PC(W) alone has changed, or a weight is not where it was.
        """
        self._require_pc()
        now = [_versions(weight) for weight in self.weights.values()]
        changes = [[a != b for a, b in zip(*both, strict=True)] for both in zip(now, self._versions, strict=True)]
        if not any(map(any, changes)):
            return
        self._require_in_place()
        loaded, is_written_anew = [all(of_weight) for of_weight in changes], self._is_stale
        for weight, (effective, orig, _), is_loaded in zip(self.weights.values(), changes, loaded, strict=True):
            if effective and not is_loaded and not is_written_anew:
                raise UserError(
                    f"{weight.name} was changed while it held PC(W), and optimizers train W: change {weight.attribute}_orig "
                    "and call preconditioner.write_pc(); after loading plain weights, call preconditioner.restart(); after "
                    "swapping averages back, preconditioner.note_loaded(); and give pc.precondition all optimizers"
                )
            self._is_stale |= orig and not effective
        if any(loaded):
            self._kept.clear()
        if all(loaded):
            self.note_loaded()
        self._note_versions()


def _has_rate(optimizer: Optimizer) -> bool:
    """Whether any rate is not 0. torch.distributed.checkpoint takes steps at rate 0, only to create optimizer state."""
    return any(group.get("lr") != 0 for group in optimizer.param_groups)


@torch.compiler.disable
def _require_w(reference: "weakref.ref[Preconditioner]", optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Called before a step of any optimizer; checks it if the preconditioner follows none.

    Raises:
        UserError: the step would train PC(W) in place of W, or, by an optimizer made before W, everything but W.
    """
    preconditioner = reference()
    if preconditioner is None or preconditioner._hooks:
        return
    held = followed.ids_of_parameters(optimizer)
    has_rate = _has_rate(optimizer)
    for weight in preconditioner.weights.values():
        if has_rate and weight.effective.grad is not None and id(weight.effective) in held:
            raise UserError(NOT_PULLED_BACK)
        if weight.orig.grad is not None and id(weight.effective) in held and id(weight.orig) not in held:
            raise UserError(
                f"this {type(optimizer).__name__} was made before pc.precondition and does not have W; call "
                "preconditioner.follow(optimizer), or give it to pc.precondition(model, optimizer)"
            )


def _versions(weight: Weight) -> list[list[tuple[int, int]]]:
    kinds = [weight.effective], weight.trained, [weight.u]
    # a DTensor has two counters: of autograd's operations, and of those on its shard
    return [[(one._version, local(one)._version) for one in tensors] for tensors in kinds]


def _add_gradient(parameter: Any, gradient: Tensor) -> None:
    if parameter is not None and parameter.requires_grad:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _bytes(kept: Kept) -> int:
    return sum(tensor.nbytes for of_part in kept for tensor in of_part)
