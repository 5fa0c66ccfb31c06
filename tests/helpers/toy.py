"""A small model with the linear layers of Llama blocks, data for it, and a training loop with PC."""

import torch
from torch import nn

import pc


class ToyBlock(nn.Module):
    """The linear layers of a Llama block under TorchTitan's names, without attention over positions."""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(d, d, bias=False) for name in ("wq", "wk", "wv", "wo")})
        self.feed_forward = nn.ModuleDict(
            {"w1": nn.Linear(d, f, bias=False), "w2": nn.Linear(f, d, bias=False), "w3": nn.Linear(d, f, bias=False)}
        )

    def forward(self, x):
        for layer in self.attention.values():
            x = x + torch.tanh(layer(x))
        w = self.feed_forward
        return x + w["w2"](nn.functional.silu(w["w1"](x)) * w["w3"](x))


def toy_model(d: int = 7, f: int = 10, layers: int = 2, seed: int = 0) -> nn.Sequential:
    """float64; with the default sizes no dimension divides by 2 or 3 ranks evenly."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*(ToyBlock(d, f) for _ in range(layers))).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3 / d**0.5)
    return model


def toy_batch(index: int, size: int = 4, d: int = 7) -> torch.Tensor:
    """[size, d] float64, the same for the same index."""
    return torch.randn(size, d, generator=torch.Generator().manual_seed(1000 + index), dtype=torch.float64)


def leading_vectors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those that power iteration converges to: u [..., n] and v [..., m] of [..., n, m]."""
    left, _, right = torch.linalg.svd(weight, full_matrices=False)
    return left[..., 0], right[..., 0, :]


def toy_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1.0).square().mean()


class Loop:
    """A training loop on the toy model; a test leaves something out."""

    def __init__(self, mode="step", follow=True, make=lambda p: torch.optim.AdamW(p, lr=1e-2), seed=0, **settings):
        self.model = pc.attach(toy_model(seed=seed), pc.PCConfig(mode=mode, **settings))
        if follow:
            self.optimizer = make(self.model.parameters())
            self.preconditioner = pc.precondition(self.model, self.optimizer)
        else:
            self.preconditioner = pc.precondition(self.model)
            self.optimizer = make(self.model.parameters())

    @property
    def parts(self):
        return self.model, self.optimizer, self.preconditioner

    def backward(self, batch=0):
        toy_loss(self.model, toy_batch(batch)).backward()

    def step(self, batch=0):
        self.backward(batch)
        self.preconditioner.pull_back()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def call(self, *names):
        for name in names:
            {"backward": self.backward, "step": self.optimizer.step}.get(
                name, getattr(self.preconditioner, name, None)
            )()
        return self

    def raw(self):
        """W and gamma of every weight."""
        return {name: (state.raw.detach().clone(), state.gamma.detach().clone()) for name, state in
                self.preconditioner.weights.items()}  # fmt: skip


def same(one, other):
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*leaves, strict=True)
    )
