"""The PC layer in one file, for a training script in one file: copy the class below.

    python examples/one_file.py                # a byte-level model on this file's own text, PC on
    python examples/one_file.py FILE --plain   # any text, without PC

It needs only torch and computes what `pc` computes (a test compares them), without its check of s, for plain weights on one
device or under DDP, where every rank does the same work. For sharded weights, checkpoints and speed, use `pc`.

The paper is "PC Layer: Polynomial Weight Preconditioning for Improving LLM Pre-Training", arXiv:2606.06470.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

# Section 3.2: g(x) = x p(x^2) lifts small singular values and keeps the largest, g(1) = 1. Coefficients of p, degree 0 first.
LEVELS = {
    1: (1.507, -0.507),
    2: (2.083, -1.643, 0.560),
    3: (2.909, -4.649, 4.023, -1.283),
    4: (3.625, -9.261, 14.097, -10.351, 2.890),
}


class PC:
    """Trains W while the model multiplies by PC(W) = gamma s.detach() g(W / s), where s estimates W's spectral norm.

    The model's own parameters hold PC(W); W is a parameter beside each, as a mixed-precision optimizer has a master weight
    beside the model's. W changes once per optimizer step, so PC(W) is computed once per step:

        loss.backward()  # every micro-batch: the gradient with respect to PC(W) adds up in the model
        preconditioner.pull_back()  # it becomes that of W and gamma. Clip after this.
        optimizer.step()  # any optimizer of `preconditioner.trained(model)`
        preconditioner.write_pc()  # the model holds the new PC(W)

    Make it after DDP has wrapped the model, which gives all ranks the same weights.
    """

    def __init__(self, effective: list[nn.Parameter], level: int = 4, iterations: int = 10) -> None:
        self.coefficients, self.iterations = LEVELS[level], iterations
        self.weights = [nn.Parameter(weight.detach().clone()) for weight in effective]  # W: what the model holds now
        self.effective = effective  # the model's parameters, each [n, m]; PC(W) from the `write_pc` below on
        self.gammas = [nn.Parameter(weight.new_ones(1)) for weight in effective]  # learnable, one per matrix
        generator = torch.Generator().manual_seed(0)  # a separate one, so that all ranks of DDP draw the same vectors
        drawn = [torch.randn(len(weight), generator=generator).to(weight) for weight in effective]
        self.u = [nn.functional.normalize(vector, dim=0) for vector in drawn]  # [n]
        self.v = [torch.zeros_like(weight[0]) for weight in effective]  # [m], from u in `write_pc`
        self.write_pc()

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """What an optimizer gets: W in place of PC(W), and the gammas."""
        left_out = {id(weight) for weight in self.effective}
        return [*(p for p in model.parameters() if id(p) not in left_out), *self.weights, *self.gammas]

    @torch.no_grad()
    def write_pc(self) -> None:
        """Advance u and v, and write PC(W) into the model."""
        for i, weight in enumerate(self.weights):
            # Algorithm 3, starting from the last step's vectors. A zero W would zero them for ever, so they stay.
            for _ in range(self.iterations if weight.any() else 0):
                self.v[i] = nn.functional.normalize(weight.mT @ self.u[i], dim=0)
                self.u[i] = nn.functional.normalize(weight @ self.v[i], dim=0)
            self.effective[i].copy_(self.pc(weight, self.gammas[i], self.u[i], self.v[i]))

    def pull_back(self) -> None:
        """Turn the gradients with respect to PC(W) into those with respect to W and gamma."""
        tensors = zip(self.effective, self.weights, self.gammas, self.u, self.v, strict=True)
        for effective, weight, gamma, u, v in tensors:
            if effective.grad is not None:
                # W, u and v are still those of the PC(W) in the model: backward through it adds the gradients
                self.pc(weight, gamma, u, v).backward(effective.grad)
                effective.grad = None

    def pc(self, weight: Tensor, gamma: Tensor, u: Tensor, v: Tensor) -> Tensor:
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
    preconditioner = PC([] if arguments.plain else [model[2].weight, model[4].weight])
    trained = preconditioner.trained(model)
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    for step in range(1, arguments.steps + 1):
        for _ in range(2):  # micro-batches
            begins = torch.randint(len(text) - context, (64, 1))
            windows = text[begins + torch.arange(context + 1)]  # [64, 17]
            loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
            (loss / 2).backward()
        preconditioner.pull_back()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        preconditioner.write_pc()
        if step == 1 or step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
