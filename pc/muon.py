"""Muon for sharded matrices: `torch.optim.Muon` with Newton-Schulz on owner ranks (`pc.owner`)."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from pc.owner import local, run_on_owners


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for `DTensor` shards; same options and bitwise the same results.

    Momentum and weight updates are elementwise and run on the shards. One owner rank (`pc.owner`) orthogonalises each
    matrix with torch's own function. Matrices travel in bfloat16, the precision of that function. They are
    orthogonalised one by one: batched matmuls round differently in about one of fifty small matrices, and at the
    sizes of language models one matmul fills a GPU.

    The momentum is torch's running mean, `buf = mu buf + (1 - mu) g`. The paper writes `buf = mu buf + g`.
    Orthogonalisation cancels the constant factor between the two, up to its epsilon of 1e-7 against the update's norm.

    A step changes nothing if the attribute `found_inf`, a device tensor as in torch's fused optimizers, is 1.
    """

    found_inf: Tensor | None = None

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
        decay: float | Tensor = 1 - lr * group["weight_decay"]
        if self.found_inf is not None:
            skip = self.found_inf.bool()
            decay = torch.where(skip, 1.0, decay)
            for gradient, buffer in zip(local_gradients, updates, strict=True):
                torch.where(
                    skip, buffer, gradient, out=gradient
                )  # averaging the buffer with itself leaves it unchanged
        torch._foreach_lerp_(updates, local_gradients, 1 - momentum)
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(local_gradients, updates, momentum))
        # bfloat16 copies, sharded as the parameters are; run_on_owners writes its results into them
        updates = [_like(p, u.to(torch.bfloat16, copy=True)) for p, u in zip(parameters, updates, strict=True)]
        settings = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        run_on_owners(_orthogonalise, [(u,) for u in updates], [(u,) for u in updates], [settings] * len(updates))
        torch._foreach_mul_(shards, decay)
        for parameter, shard, update in zip(parameters, shards, updates, strict=True):
            if self.found_inf is not None:
                local(update).masked_fill_(skip, 0)
            shard.add_(local(update), alpha=-_adjust_lr(lr, group["adjust_lr_fn"], parameter.shape))


def _orthogonalise(settings: tuple, updates: Tensor) -> tuple[Tensor]:
    return (torch.stack([_zeropower_via_newtonschulz(update, *settings) for update in updates]),)


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
