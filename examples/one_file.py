"""The PC layer in one file, for a training script in one file: copy the class below.

    python examples/one_file.py                # a byte-level model on this file's own text, PC on
    python examples/one_file.py FILE --plain   # any text, without PC

It needs torch alone and computes what `pc` computes in mode "step" (a test compares them), for plain weights on one
device or under DDP, where every rank does the same work. For sharded weights, checkpoints and speed, use `pc`.

The paper is "PC Layer: Polynomial Weight Preconditioning for Improving LLM Pre-Training", arXiv:2606.06470.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

# Section 3.2: g(x) = x p(x^2) lifts small singular values and leaves the largest, g(1) = 1. Coefficients of p, degree 0 first.
LEVELS = {
    1: (1.507, -0.507),
    2: (2.083, -1.643, 0.560),
    3: (2.909, -4.649, 4.023, -1.283),
    4: (3.625, -9.261, 14.097, -10.351, 2.890),
}


class PC:
    """Trains W while the model multiplies by PC(W) = gamma s.detach() g(W / s), where s estimates W's spectral norm.

    Weights change once per optimizer step, so PC(W) is computed once per step. Between steps the model's parameters hold
    PC(W), and forward and backward passes are those of a plain model:

        loss.backward()  # every micro-batch: the gradient with respect to PC(W) accumulates
        preconditioner.pull_back_and_restore()  # it becomes that of W and gamma; the model holds W. Clip after this.
        optimizer.step()  # any optimizer; give it `preconditioner.gammas` too
        preconditioner.write_pc()  # the model holds the new PC(W)

    Make it after DDP has wrapped the model, which gives all ranks the same weights.
    """

    def __init__(self, weights: list[nn.Parameter], level: int = 4, iterations: int = 10) -> None:
        self.coefficients, self.iterations = LEVELS[level], iterations
        self.weights = weights  # each [n, m]
        self.gammas = [nn.Parameter(weight.new_ones(1)) for weight in weights]  # learnable, one per matrix
        self.raw = [weight.detach().clone() for weight in weights]  # W
        generator = torch.Generator().manual_seed(0)  # its own, so that all ranks of DDP draw the same vectors
        drawn = [torch.randn(len(weight), generator=generator).to(weight) for weight in weights]
        self.u = [nn.functional.normalize(vector, dim=0) for vector in drawn]  # [n]
        self.v = [torch.zeros_like(weight[0]) for weight in weights]  # [m], from u in `write_pc`
        self.write_pc()

    @torch.no_grad()
    def write_pc(self) -> None:
        """Keep W, move u and v on, and write PC(W) into the parameters."""
        for i, weight in enumerate(self.weights):
            self.raw[i].copy_(weight)
            for _ in range(self.iterations if weight.any() else 0):  # algorithm 3; u and v go on from the last step's
                self.v[i] = nn.functional.normalize(weight.mT @ self.u[i], dim=0)
                self.u[i] = nn.functional.normalize(weight @ self.v[i], dim=0)
            weight.copy_(self.effective(self.raw[i], self.gammas[i], self.u[i], self.v[i]))

    def pull_back_and_restore(self) -> None:
        """Replace the gradients with respect to PC(W) by those with respect to W and gamma, and PC(W) by W."""
        for weight, raw, gamma, u, v in zip(self.weights, self.raw, self.gammas, self.u, self.v, strict=True):
            if weight.grad is not None:
                given = raw.clone().requires_grad_()
                result = self.effective(given, gamma, u, v)  # with the u and v of this step's PC(W)
                weight.grad, gamma.grad = torch.autograd.grad(result, (given, gamma), weight.grad)
            with torch.no_grad():
                weight.copy_(raw)

    def effective(self, weight: Tensor, gamma: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """PC(W) [n, m] (algorithm 1). u and v are constants, and so is the s that puts the norm back."""
        s = u @ weight @ v + 1e-7  # the largest singular value, as far as u and v have converged
        scaled = weight / s  # singular values at most about 1; the gradient flows through this s
        tall = weight.shape[0] > weight.shape[1]
        gram = scaled.mT @ scaled if tall else scaled @ scaled.mT  # the smaller one, eigenvalues sigma^2
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        p = self.coefficients[-1] * identity
        for coefficient in reversed(self.coefficients[:-1]):  # p(gram) by Horner's rule
            p = p @ gram + coefficient * identity
        return gamma * s.detach() * (scaled @ p if tall else p @ scaled)  # proposition 1: sigma becomes g(sigma)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__))
    parser.add_argument("--plain", action="store_true", help="without PC")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    text = torch.tensor(list(arguments.file.read_bytes()))  # [bytes]
    context, width = 16, 128  # the model predicts a byte from the 16 before it
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(context * 32, width, bias=False), nn.SiLU(),
        nn.Linear(width, width, bias=False), nn.SiLU(), nn.Linear(width, 256),
    )  # fmt: skip
    preconditioner = None if arguments.plain else PC([model[2].weight, model[4].weight])
    gammas = preconditioner.gammas if preconditioner else []
    optimizer = torch.optim.AdamW([*model.parameters(), *gammas], lr=3e-3)
    for step in range(1, arguments.steps + 1):
        for _ in range(2):  # micro-batches
            begins = torch.randint(len(text) - context, (64, 1))
            windows = text[begins + torch.arange(context + 1)]  # [64, 17]
            loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
            (loss / 2).backward()
        if preconditioner:
            preconditioner.pull_back_and_restore()
        nn.utils.clip_grad_norm_([*model.parameters(), *gammas], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if preconditioner:
            preconditioner.write_pc()
        if step == 1 or step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
