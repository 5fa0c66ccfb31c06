"""Muon for sharded matrices: `torch.optim.Muon` with its Newton-Schulz on owner ranks."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pc.owner import local, run_on_owners

# (a, b, c) of each Newton-Schulz step X <- a X + (b G + c G^2) X with G = X X^T.
# "jordan2024": K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; also torch's default
# and the paper's (section 4.1).
NEWTON_SCHULZ_COEFFICIENTS: dict[str, tuple[float, float, float]] = {"jordan2024": (3.4445, -4.7750, 2.0315)}


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` that works on `DTensor` shards; same options, same results bit for bit.

    Momentum and the weight update are elementwise and stay on the shards. Each matrix is orthogonalised on
    one owner rank (`pc.owner`), travelling there and back in bfloat16, which is what Newton-Schulz computes in.

    The momentum is torch's running mean, `buf = mu buf + (1 - mu) g`. The paper writes `buf = mu buf + g`;
    the two differ by a constant factor that the orthogonalisation cancels, up to its epsilon of 1e-7 against
    the norm of the whole update.
    """

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
        shards, local_gradients, local_buffers = ([local(t) for t in x] for x in (parameters, gradients, buffers))
        torch._foreach_lerp_(local_buffers, local_gradients, 1 - momentum)
        updates = local_buffers
        if group["nesterov"]:
            updates = torch._foreach_lerp(local_gradients, local_buffers, momentum)
        # Onto the parameters' layout again, as bfloat16 copies that the results may overwrite.
        updates = [_like(p, u.to(torch.bfloat16, copy=True)) for p, u in zip(parameters, updates, strict=True)]
        settings = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        run_on_owners(_orthogonalise, [(u,) for u in updates], [(u,) for u in updates], [settings] * len(updates))
        torch._foreach_mul_(shards, 1 - lr * group["weight_decay"])
        for parameter, shard, update in zip(parameters, shards, updates, strict=True):
            shard.add_(local(update), alpha=-lr * learning_rate_factor(group["adjust_lr_fn"], parameter.shape))


def newton_schulz(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Tensor:
    """Push all singular values of `update` towards one; same as torch's, for a batch.

    Args:
        update: [B, n, m]; computed in bfloat16.
        coefficients: (a, b, c) of the quintic.
        steps: how many times to apply it.
        epsilon: lower bound of the Frobenius norm that the matrices are divided by.

    Returns:
        [B, n, m] bfloat16.
    """
    a, b, c = coefficients
    x = update.bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = torch.stack([matrix / matrix.norm().clamp(min=epsilon) for matrix in x])
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def learning_rate_factor(adjust: str | None, shape: torch.Size) -> float:
    """What the learning rate of a matrix [n, m] is multiplied by; names as in `torch.optim.Muon`."""
    n, m = shape[:2]
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(n, m))
    return math.sqrt(max(1, n / m))


def _orthogonalise(settings: tuple, update: Tensor) -> tuple[Tensor]:
    return (newton_schulz(update, *settings),)


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

