"""Muon with weights of constant norm: every weight stays on a sphere, and the learning rate is an angle.

    python examples/hyperball.py
    torchrun --nproc-per-node 2 examples/hyperball.py

The direction D is Muon's, with norm 1; W becomes W - lr |W| D, rescaled to the norm that W had at the first step.
"""

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from pc import owner


class Hyperball(torch.optim.Optimizer):
    """Args: params: matrices, sharded or not; lr: length of a step relative to the weight's norm."""

    def __init__(self, params, lr: float = 1e-2, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            inputs = []
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                    # the norm of the full matrix: plain, so every rank gets it; 0 until the first step
                    state["radius"] = torch.zeros(1, dtype=weight.dtype, device=weight.device)
                buffer = state["momentum"].mul_(group["momentum"]).add_(weight.grad)
                inputs.append((weight, weight.grad.add(buffer, alpha=group["momentum"]), state["radius"]))
            outputs = [(weight, radius) for weight, _, radius in inputs]
            owner.Plan(inputs, outputs, [group["lr"]] * len(inputs)).run(hyperball, inputs, outputs)


def hyperball(lr: float, weight: Tensor, update: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """On the owner, for a batch: W [B, n, m], update [B, n, m], radius [B, 1] -> new W, radius."""
    options = (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS
    direction = torch.stack([_zeropower_via_newtonschulz(one, *options) for one in update]).to(weight.dtype)
    radius = torch.where(radius > 0, radius, norm(weight)[:, 0])
    moved = weight - lr * radius[:, None] * direction / norm(direction)
    return moved * (radius[:, None] / norm(moved)), radius


def norm(matrices: Tensor) -> Tensor:  # [B, n, m] -> [B, 1, 1]
    return matrices.norm(dim=(1, 2), keepdim=True)


if __name__ == "__main__":
    from fit import fit

    fit(lambda parameters: Hyperball(parameters, lr=3e-2))
