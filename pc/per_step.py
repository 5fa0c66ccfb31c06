"""Mode "step": PC(W) is computed once per optimizer step, because the weights change only then.

Between steps a weight *is* PC(W), so forward and backward passes are those of a plain model, for any number of
micro-batches and any parallelism:

    weights hold   forward, backward   gradients of   what happens
    PC(W)          each micro-batch    PC(W)
    PC(W)                              W              pull_back(), after the last one: a vector-Jacobian product
    W                                  W              restore_raw(), after clipping, before the optimizer's step
    W + update                                        the optimizer's step, with its decay
    PC(W)                                             write_pc(), after it: save W, advance u and v, compute PC(W)

`pull_back` is linear in the gradient, so one call on the accumulated gradient equals the sum of the backward passes of
mode "forward". Both passes need full matrices; `pc.owner` gathers each on one rank. From write_pc() to the next
pull_back() an owner keeps square matrices that both need, up to `KEPT_BYTES`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pc import owner_functions
from pc.change_check import ChangeCheck
from pc.errors import UserError
from pc.owner import Item, Plan, RecentPlans
from pc.preconditioner import Preconditioner
from pc.shards import local, shard_gammas, shard_like, viewed
from pc.spectral import without_autocast
from pc.splits import WeightSplit
from pc.weight import Weight

# What a rank keeps from write_pc() to pull_back(), at most; it computes the rest again. Both need more while they run.
KEPT_BYTES = 256 * 2**20

PULLED_RAW = (
    "pull_back() while the weights hold W: an optimizer did not step, and a compiled forward pass does not write PC(W) "
    "by itself; call preconditioner.write_pc() before the forward pass"
)
TWICE = (
    "pull_back() on gradients that are already those of W; call it once per step, after the last micro-batch, and "
    'optimizer.zero_grad() before the next backward(); a loss that contains a gamma itself needs mode="forward"'
)
NOT_PULLED_BACK = (
    "a step on gradients of PC(W), without preconditioner.pull_back() since the last backward(); it makes them those "
    "of W: call it once per step, before clipping"
)
IS_PC = (
    "the weights that were loaded are PC(W) of a training run: load its preconditioner's state too, or call "
    "pc.preserve(model), or load dict(state), which drops that mark, to use them as W"
)


class PerStep(Preconditioner):
    """Stores W and switches the weights between W and PC(W)."""

    saved = ("raw", "gamma", "u", "v")

    def __init__(
        self, models: list[nn.Module], weights: dict[str, Weight], replicas: dist.ProcessGroup | None = None
    ) -> None:
        self._fsdp_modules = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
        # Parameters are read once, here, and must be the sharded ones. After a forward pass without gradients FSDP may
        # still hold unsharded ones.
        self._reshard()
        self._plans = RecentPlans()
        self._kept: dict[tuple, owner_functions.Kept] = {}
        """by the matrices of a batch; for the PC(W) that the weights hold"""
        self._is_writing = False
        """whether W is in `raw` alone: PC(W) was not written to its end, as after Ctrl-C in a notebook"""
        super().__init__(models, weights, replicas)
        self._changes = ChangeCheck(list(weights.values()))
        self._backward_hooks: dict[str, RemovableHandle] = {}
        """of the weights that are trained, by name"""
        self._observe()

    def __getstate__(self) -> dict:
        # without process groups and hooks
        return super().__getstate__() | {"_kept": {}, "_backward_hooks": {}}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._observe()

    def _observe(self) -> None:
        def note_backward(_: Tensor) -> None:
            self.is_pulled_back = False

        for name, weight in self.weights.items():
            if weight.parameter.requires_grad and name not in self._backward_hooks:
                self._backward_hooks[name] = weight.parameter.register_post_accumulate_grad_hook(note_backward)

    def leave(self) -> None:
        super().leave()
        for hook in self._backward_hooks.values():
            hook.remove()

    @torch.no_grad()
    def _add_tensors(self, weight: Weight) -> None:
        parameter = weight.parameter
        if weight.config.learnable_gamma:
            ones = torch.ones(weight.split.gamma_shape, device=parameter.device, dtype=parameter.dtype)
            # requires_grad: of a plain weight from the first `pull_back` on, because a DDP that wraps the model before
            # that would wait for gamma's gradient, which only `pull_back` sets; of a sharded one, because distributed
            # checkpoints save optimizer states of such parameters alone.
            gamma = nn.Parameter(shard_gammas(parameter, ones), requires_grad=isinstance(parameter, DTensor))
            weight.module.register_parameter(weight.gamma_attribute, gamma)
        given = weight.split.initial_vectors(weight.name) if weight.u is None else (weight.u, weight.v)
        vectors = (vector.to(parameter.device, parameter.dtype) for vector in given)
        weight.u, weight.v = (shard_like(parameter, vector) for vector in vectors)
        weight.raw = parameter.detach().clone()

    @torch.no_grad()
    def write_pc(self, share: bool = False) -> None:
        """Unless the weights hold PC(W): save W from them, advance `u` and `v`, and write PC(W) into them.

        Raises:
            UserError: the weights were loaded and are PC(W) of a run, whose W is not known.
        """
        if not self._hooks:  # a loop by hand
            self._observe()
        if self.holds_pc:
            return
        self._require_same_place()
        weights = self.weights.values()
        if not self.has_started and any(weight.is_loaded_pc for weight in weights):
            raise UserError(IS_PC)
        if not self._is_writing:
            torch._foreach_copy_([local(w.raw) for w in weights], [local(w.parameter) for w in weights])
        self._write_pc(advance_first=True, share=share)
        self._changes.note()
        self.is_pulled_back = False

    def _use_loaded(self) -> None:
        """Compute PC(W) anew, so that the order of loading model and preconditioner does not matter."""
        self._set_holds_pc(False)
        self._write_pc(advance_first=False, share=False)
        self._changes.forget()  # the model's state, loaded after this one, may have other rounding errors

    def _write_pc(self, advance_first: bool, share: bool) -> None:
        self._is_writing = True
        self._reshard()
        weights = list(self.weights.values())
        inputs = [(w.raw, *w.gammas, w.u, w.v) for w in weights]
        outputs: list[Item] = [(w.parameter, w.u, w.v) for w in weights]
        self._kept.clear()
        self._run("write", partial(self._write_batch, advance_first=advance_first), weights, inputs, outputs, share)
        self._is_writing = False
        self._set_holds_pc(True)

    @torch.no_grad()
    def pull_back(self) -> None:
        if not self.holds_pc:
            raise UserError(PULLED_RAW)
        if self.is_pulled_back:
            raise UserError(TWICE)
        self._require_same_place()
        self.require_unchanged()
        used = [w for w in self.weights.values() if w.parameter.grad is not None]
        if not used:
            raise UserError("pull_back() found no gradient of a weight with PC; call it after backward()")
        for weight in used:
            if weight.name not in self._backward_hooks:
                raise UserError(
                    f"{weight.name} was unfrozen; call preconditioner.follow(optimizer) before the forward pass, or where none "
                    "is followed preconditioner.write_pc()"
                )
        # Only `pull_back` gives gammas a gradient, and zero_grad() takes it away or makes it zero.
        trained = [w.gamma for w in used if w.gamma is not None]
        earlier = [local(gamma.grad) for gamma in trained if gamma.grad is not None]
        if earlier and self.on_any_rank(torch.cat(earlier).any()):
            raise UserError(TWICE)
        gradients: list[Any] = [(w.parameter.grad, *(torch.zeros_like(gamma) for gamma in w.gammas)) for w in used]
        inputs = [(w.raw, g, *w.gammas, w.u, w.v) for w, (g, *_) in zip(used, gradients, strict=True)]
        self._run("pull back", self._pull_back_batch, used, inputs, gradients)
        for weight, (_, *of_gamma) in zip(used, gradients, strict=True):
            if weight.gamma is not None:
                weight.gamma.requires_grad_()  # loops clip the parameters that do
                weight.gamma.grad = viewed(of_gamma[0], weight.gamma.shape) if weight.split.stack else of_gamma[0]
        self.is_pulled_back = True

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            return super()._before_step(optimizer, args, kwargs)
        self.write_pc()  # a compiled model has no hook before its forward pass that would do it
        with torch.enable_grad():
            loss = closure()
        if self.has_gradients() and not self.is_pulled_back:
            self.pull_back()
        super()._before_step(optimizer, args, kwargs)
        was_called = False

        def loss_once() -> Any:
            nonlocal was_called
            if was_called:
                raise UserError(
                    f"{type(optimizer).__name__} calls its closure again within a step, when the weights hold W; "
                    'use mode="forward"'
                )
            was_called = True
            return loss

        return args[:1], {**kwargs, "closure": loss_once}

    def _prepare_step(self) -> bool:
        if self.holds_pc and not self.is_pulled_back and not self.has_gradients():
            return False  # no weight with PC changes
        self.restore_raw()
        return True

    def restore_raw(self) -> None:
        if not self.is_pulled_back and self.has_gradients():
            raise UserError(NOT_PULLED_BACK)
        self.require_unchanged()
        self.write_raw()

    @torch.no_grad()
    def write_raw(self) -> None:
        if not self.holds_pc and not self._is_writing:
            return
        self._reshard()
        weights = self.weights.values()
        torch._foreach_copy_([local(w.parameter) for w in weights], [local(w.raw) for w in weights])
        self._kept.clear()
        self._is_writing = False
        self._set_holds_pc(False)

    def require_unchanged(self, alone: bool = False) -> None:
        if self.holds_pc:
            self._changes.require_unchanged(None if alone else self.on_any_rank)

    def _require_same_place(self) -> None:
        for weight in self.weights.values():
            now, before = weight.parameter, weight.raw
            if (now.dtype, now.device) != (before.dtype, before.device):
                raise UserError(
                    f"{weight.name} is {now.dtype} on {now.device} now, and was {before.dtype} on {before.device}: call "
                    "pc.precondition after model.to() and the like"
                )

    def _run(
        self, name: str, function: Callable, weights: list[Weight], inputs: list, outputs: list, share: bool = True
    ) -> None:
        """`_write_batch` or `_pull_back_batch` of every weight on its owner."""
        replicas = self._replicas if share else None
        key = (name, replicas, *(w.name for w in weights))
        splits = [w.split for w in weights]
        plan = self._plans.get(key, lambda: Plan(inputs, outputs, splits, [split.cost for split in splits], replicas))
        batches = iter(plan.batches)

        def on_batch(split: WeightSplit, *tensors: Tensor) -> Sequence[Tensor]:
            return function(tuple((weights[item].name, index) for item, index in next(batches)), split, *tensors)

        with without_autocast(weights[0].raw):
            plan.run(on_batch, inputs, outputs)

    def _write_batch(
        self, matrices: tuple, split: WeightSplit, *tensors: Tensor, advance_first: bool
    ) -> Sequence[Tensor]:
        *results, kept = owner_functions.write(split, *tensors, advance_first=advance_first)
        if sum(map(_bytes, self._kept.values())) + _bytes(kept) <= KEPT_BYTES:
            self._kept[matrices] = kept
        return results

    def _pull_back_batch(self, matrices: tuple, split: WeightSplit, *tensors: Tensor) -> Sequence[Tensor]:
        return owner_functions.pull_back(split, *tensors, kept=self._kept.get(matrices, ()))

    def _reshard(self) -> None:
        # While FSDP holds the unsharded parameter, a write to the shard has no effect.
        for module in self._fsdp_modules:
            module.reshard()


def _bytes(kept: owner_functions.Kept) -> int:
    return sum(tensor.nbytes for of_part in kept for tensor in of_part)
