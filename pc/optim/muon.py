"""Muon for sharded matrices: `torch.optim.Muon` with Newton-Schulz on owner ranks (`pc.owner`)."""

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from pc.config import MatrixSplit, PCConfig
from pc.owner import Plan, RecentPlans
from pc.shards import local
from pc.splits import WeightSplit, split_of


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for `DTensor` shards and for weights of several matrices; on single matrices with the same
    options bitwise the same results.

        pc.Muon([{"params": matrices}, {"params": experts, "split": pc.MatrixSplit(("gate", "up"))}], lr=1e-3)

    Momentum and weight updates are elementwise and run on the shards. One owner rank (`pc.owner`) orthogonalises each
    matrix with torch's own function. Matrices travel in bfloat16, the precision of that function. They are
    orthogonalised one by one: batched matmuls round differently in about one of fifty small matrices, and at the
    sizes of language models one matmul fills a GPU. The weights of a parameter group with a "split" are cut into matrices, as
    weights with PC are. Each matrix gets the learning-rate factor of its own shape.

    The momentum is torch's running mean, `buf = mu buf + (1 - mu) g`. The paper writes `buf = mu buf + g`.
    Orthogonalisation cancels the constant factor between the two, up to its epsilon of 1e-7 against the update's norm.

    Raises:
        TypeError: an unknown option.
        ValueError: a parameter that is no matrix, in a group without a "split".
        UserError: a split does not fit.
    """

    def __init__(self, params, **options) -> None:
        self._plans = RecentPlans()
        checked = torch.optim.Muon([torch.empty(1, 1)], **options).defaults
        Optimizer.__init__(self, params, checked)  # torch's own would refuse weights of three dimensions

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if isinstance(group.get("split"), MatrixSplit):
            group["split"] = astuple(group["split"])  # a tuple, which a checkpoint can hold
        for parameter in group["params"]:
            if parameter.ndim != 2 and "split" not in group:
                raise ValueError(
                    f"Muon needs matrices, not {[*parameter.shape]}: give vectors to another optimizer, and a stack of matrices "
                    'a "split" in its parameter group'
                )
            _split(parameter, group)  # raises if it does not fit

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._plans = RecentPlans()  # torch does not copy a subclass's attributes

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict) -> None:
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        buffers: list[Tensor] = []
        self._init_group(group, parameters, gradients, buffers)
        if not parameters:
            return
        momentum, lr = group["momentum"], float(group["lr"])
        shards, local_gradients, updates = ([local(t) for t in x] for x in (parameters, gradients, buffers))
        torch._foreach_lerp_(updates, local_gradients, 1 - momentum)  # these are the momentum buffers
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(local_gradients, updates, momentum))
        # bfloat16 copies, sharded as the parameters are; the plan writes its results into them
        items = [(torch.empty_like(parameter, dtype=torch.bfloat16),) for parameter in parameters]
        torch._foreach_copy_([local(update) for (update,) in items], updates)
        splits = [_split(parameter, group) for parameter in parameters]
        options = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        factors = [
            [_adjust_lr(1.0, group["adjust_lr_fn"], torch.Size((p.rows, split.columns))) for p in split.parts]
            for split in splits
        ]
        # Example: a weight's parts have the factors 1 and 2. The owner multiplies them by 0.5 and 1, in bfloat16;
        # `shard.add_` below multiplies the update by 2. With one part the owner's factor is 1, so that its update is not
        # rounded once more.
        settings = [(split, options, tuple(f / max(of) for f in of)) for split, of in zip(splits, factors, strict=True)]
        name = (*map(id, parameters), *settings)
        plan = self._plans.get(name, lambda: Plan(items, items, settings, [split.cost for split in splits]))
        plan.run(_orthogonalise, items, items)
        torch._foreach_mul_(shards, 1 - lr * group["weight_decay"])
        for shard, (update,), of in zip(shards, items, factors, strict=True):
            shard.add_(local(update), alpha=-lr * max(of))


_EVERY_PART = PCConfig()  # Muon takes every part, and reads no setting of PC


def _split(parameter: Tensor, group: dict) -> WeightSplit:
    given = MatrixSplit(*group.get("split", ()))
    number = len(given.blocks)
    return split_of("a parameter", parameter.shape, given, [_EVERY_PART] * number, [given.head_dim] * number)


def _orthogonalise(settings: tuple, updates: Tensor) -> tuple[Tensor]:
    """Orthogonalise every matrix, and multiply it by its part's factor in `settings`."""
    split, options, scales = settings
    parts = [
        torch.stack([_zeropower_via_newtonschulz(matrix, *options) for matrix in matrices])
        for matrices in split.split_weight(updates)
    ]
    scaled = [part if scale == 1 else part * scale for part, scale in zip(parts, scales, strict=True)]
    return (split.join_weight(scaled, updates),)
