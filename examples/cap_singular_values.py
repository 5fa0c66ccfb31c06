"""A weight constraint: after each optimizer step, no singular value of a weight is above a cap.

python examples/cap_singular_values.py
torchrun --nproc-per-node 2 examples/cap_singular_values.py
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from pc import owner


class Cap:
    """Caps the singular values of weights, now and after each step of an optimizer.

    Args:
        weights: matrices [n, m], sharded or not.
        cap: the largest singular value.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Iterable[Tensor], cap: float) -> None:
        self.cap, self.items = cap, [(weight,) for weight in weights]
        self.plan = owner.Plan(self.items, self.items)
        optimizer.register_step_post_hook(lambda *_: self.apply())
        self.apply()

    def apply(self) -> None:
        self.plan.run(self._capped, self.items, self.items)

    def _capped(self, _: None, weight: Tensor) -> tuple[Tensor]:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)  # [B, n, k], [B, k], [B, k, m]
        return (u * s.clamp(max=self.cap)[:, None] @ vh,)


def main() -> None:
    from fit import fit

    def make_optimizer(parameters):
        parameters = list(parameters)
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        Cap(optimizer, parameters, cap=1.5)
        return optimizer

    fit(make_optimizer)


if __name__ == "__main__":
    main()
