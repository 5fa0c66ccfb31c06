"""A small model with the linear layers of Llama blocks, and data for it."""

import torch
from torch import nn


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


def toy_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1.0).square().mean()
