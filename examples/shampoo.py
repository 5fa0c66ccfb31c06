"""An optimizer whose state has other shapes than the weight: Shampoo, with two small factors per matrix.

    python examples/shampoo.py
    torchrun --nproc-per-node 2 examples/shampoo.py

For a gradient G [n, m], L = sum of G G^T and R = sum of G^T G, and the update is L^(-1/4) G R^(-1/4) (Gupta, Koren and
Singer 2018, Algorithm 1). The factors are sharded as their weight is, so a checkpoint holds them like other state.
"""

import torch
from torch import Tensor

from pc import owner


class Shampoo(torch.optim.Optimizer):
    """Args: params: matrices, sharded or not; epsilon: added to the eigenvalues of L and R."""

    def __init__(self, params, lr: float = 1e-2, epsilon: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    for name, size in zip(("left", "right"), weight.shape, strict=True):
                        zeros = torch.zeros(size, size, dtype=weight.dtype, device=weight.device)
                        self.state[weight][name] = owner.shard_like(weight, zeros)
            factors = [(self.state[weight]["left"], self.state[weight]["right"]) for weight in weights]
            inputs = [(weight.grad, *pair) for weight, pair in zip(weights, factors, strict=True)]
            outputs = [(torch.empty_like(weight), *pair) for weight, pair in zip(weights, factors, strict=True)]
            owner.Plan(inputs, outputs, [group["epsilon"]] * len(weights)).run(shampoo, inputs, outputs)
            for weight, (update, *_) in zip(weights, outputs, strict=True):
                weight.add_(update, alpha=-group["lr"])


def shampoo(epsilon: float, gradient: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """On the owner, for a batch: G [B, n, m], L [B, n, n], R [B, m, m] -> update [B, n, m], new L, new R."""
    left, right = left + gradient @ gradient.mT, right + gradient.mT @ gradient
    return inverse_root(left, epsilon) @ gradient @ inverse_root(right, epsilon), left, right


def inverse_root(matrix: Tensor, epsilon: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * (values.clamp(min=0) + epsilon).pow(-1 / 4)[:, None] @ vectors.mT


if __name__ == "__main__":
    from fit import fit

    fit(lambda parameters: Shampoo(parameters, lr=3e-2))
