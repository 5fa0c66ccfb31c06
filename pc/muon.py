"""Muon for sharded matrices: `torch.optim.Muon` with its Newton-Schulz on owner ranks."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from pc.owner import local, run_on_owners

# (a, b, c) of each Newton-Schulz step X <- a X + (b G + c G^2) X with G = X X^T.
NEWTON_SCHULZ_COEFFICIENTS: dict[str, tuple[float, float, float]] = {
    # K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; torch's default, and the paper's.
    "jordan2024": (3.4445, -4.7750, 2.0315),
}


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that works on `DTensor` shards; same options, same results bit for bit.

    Momentum and the weight update are elementwise and stay on the shards. Each matrix is orthogonalised on
    one owner rank (`pc.owner`) by torch's own function, and travels there and back in bfloat16, which is what
    that function computes in. Matrices are orthogonalised one by one: batched products round differently in
    about one of fifty small matrices, and at the sizes of language models one product fills a device.

    The momentum is torch's running mean, `buf = mu buf + (1 - mu) g`. The paper writes `buf = mu buf + g`;
    the two differ by a constant factor that the orthogonalisation cancels, up to its epsilon of 1e-7 against
    the norm of the whole update.

    A step changes nothing if the attribute `found_inf`, a tensor on the device as in torch's fused optimizers, is 1.
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
                torch.where(skip, buffer, gradient, out=gradient)  # a running mean of its own value stays as it is
        torch._foreach_lerp_(updates, local_gradients, 1 - momentum)
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(local_gradients, updates, momentum))
        # bfloat16 copies, which the results may overwrite, laid out as the parameters are
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
