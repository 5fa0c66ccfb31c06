"""A small model with the linear layers of Llama blocks, data for it, and a training loop with PC."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import pc
from pc.layer import put_in_graph


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
    """A float64 model; by default no size is divisible by 3, nor d by 2, so shards are uneven."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*(ToyBlock(d, f) for _ in range(layers))).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3 / d**0.5)
    return model


def toy_batch(index: int, d: int = 7) -> torch.Tensor:
    """[4, d] float64, the same for the same index."""
    return torch.randn(4, d, generator=torch.Generator().manual_seed(1000 + index), dtype=torch.float64)


def leading_vectors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What power iteration converges to: u [..., n] and v [..., m] of [..., n, m]."""
    left, _, right = torch.linalg.svd(weight, full_matrices=False)
    return left[..., 0], right[..., 0, :]


def toy_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1.0).square().mean()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def one_for_each_block(parameters):
    parameters = [*parameters]
    first = parameters[: len(parameters) // 2]
    return [torch.optim.SGD(some, lr=0.1, momentum=0.9) for some in (first, parameters[len(first) :])]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Loop:
    """A training loop on the toy model; tests leave some of its calls out.

    Args:
        make: makes an optimizer, or a list of several, from parameters.
        follow: whether the preconditioner follows it, or the loop calls `write_pc` by hand.
    """

    def __init__(self, make=adamw, follow=True, seed=0, wrap=lambda model: model, **settings):
        self.model = wrap(pc.attach(toy_model(seed=seed), pc.PCConfig(**settings)))
        if follow:
            self.optimizers = _listed(make(self.model.parameters()))
            self.preconditioner = pc.precondition(self.model, *self.optimizers)
        else:
            self.preconditioner = pc.precondition(self.model)
            self.optimizers = _listed(make(self.model.parameters()))
        self.follows = follow

    @property
    def optimizer(self):
        (optimizer,) = self.optimizers
        return optimizer

    @property
    def parts(self):
        return self.model, self.optimizer

    def backward(self, batch=0, scale=1.0):
        loss = toy_loss(self.model, toy_batch(batch)) * scale
        loss.backward()
        return loss.detach()

    def pull_back(self):
        self.preconditioner.pull_back()

    def refresh(self):
        """What a loop does after its optimizers' steps."""
        if not self.follows:
            self.preconditioner.write_pc()

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()
        self.refresh()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, batch=0):
        self.backward(batch)
        self.pull_back()
        self.update()

    def call(self, *names):
        for name in names:
            {"backward": self.backward, "step": self.optimizer.step}.get(
                name, getattr(self.preconditioner, name, None)
            )()
        return self

    def trained(self):
        return trained(self.preconditioner)


class InGraph(Loop):
    """The same loop with the paper's layers, whose PC(W) is in the autograd graph: the reference."""

    def __init__(self, make=adamw, **settings):
        self.model = toy_model()
        self.layers = put_in_graph(self.model, pc.PCConfig(**settings))
        self.optimizers = _listed(make(self.model.parameters()))

    def pull_back(self):
        pass

    def refresh(self):
        for layer in self.layers.values():
            layer.refresh()

    def trained(self):
        return {name: (whole(layer.weight), whole(layer.gamma)) for name, layer in self.layers.items()}


def _listed(made):
    return made if isinstance(made, list) else [made]


def trained(preconditioner):
    """W and gamma of every weight."""
    return {name: (whole(w.orig), whole(w.gamma)) for name, w in preconditioner.weights.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor, on this rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def expected_pc(preconditioner):
    """PC(W) from the preconditioner's W, gamma, u and v, by the reference `pc.effective_weight`."""
    return {
        name: pc.effective_weight(*map(whole, (w.orig, w.gamma, w.u, w.v)), w.config).detach()
        for name, w in preconditioner.weights.items()
    }


def require_pc(preconditioner, tolerance=1e-12):
    """Assert that each `weight` holds PC(W)."""
    for name, expected in expected_pc(preconditioner).items():
        found = whole(preconditioner.weights[name].effective)
        torch.testing.assert_close(
            found, expected, rtol=0, atol=tolerance, msg=lambda said, name=name: f"{name}: {said}"
        )


def require_near(found, expected, tolerance=1e-12):
    """Assert equal names and, up to rounding in float64, equal tensors."""
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for tensor, other in zip(found[name], tensors, strict=True):
            torch.testing.assert_close(
                tensor, other, rtol=0, atol=tolerance, msg=lambda said, name=name: f"{name}: {said}"
            )


def same(one, other):
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*leaves, strict=True)
    )
