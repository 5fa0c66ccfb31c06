"""Errors of PC's two passes in each precision, against float64; on a GPU with its own matmuls.

    python benchmarks/precision.py [--width 1024] [--levels 2 4]

W [n, m] has known singular values: from 1 to 0 in equal steps, about those of a Gaussian matrix, and from 1 to 1e-3 by
equal factors, where few directions dominate. The table has the largest error over both spectra, a square and a wide
matrix, three magnitudes of weights and gradients, and square matrices kept from the first pass or computed again. The error
of singular values is that of PC(W) along the singular vectors of W, relative to the largest of W.

On a CPU a GPU is emulated: factors are rounded in TF32 to 10 of 23 mantissa bits, sums are float32. Tensor cores drop some
low bits of their sums, which this does not show.
"""

import argparse
from collections import defaultdict
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pc import PCConfig
from pc.method import method_of
from pc_recipe.pages import markdown
from timing import DEVICE, ON_GPU

PRECISIONS = ("float32", "tf32")
SIZES = (1.0, 1e-5, 1e10)  # of weights and gradients


class EmulatedGPU(TorchDispatchMode):
    """A GPU's arithmetic on a CPU: factors of matmuls in the precision that it would use."""

    FACTORS = {
        torch.ops.aten.mm.default: (0, 1),
        torch.ops.aten.bmm.default: (0, 1),
        torch.ops.aten.baddbmm.default: (1, 2),
        torch.ops.aten.baddbmm.out: (1, 2),
    }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.FACTORS and torch.backends.cuda.matmul.fp32_precision == "tf32":
            args = [round_to_tf32(x) if i in self.FACTORS[function] else x for i, x in enumerate(args)]
        return function(*args, **(kwargs or {}))


def round_to_tf32(tensor: Tensor) -> Tensor:
    """float32 values with 10 of 23 mantissa bits, to nearest even."""
    bits = tensor.contiguous().view(torch.int32)
    half_minus_one_and_odd = 0xFFF + ((bits >> 13) & 1)
    return ((bits + half_minus_one_and_odd) & ~0x1FFF).view(torch.float32)


def spectra(size: int) -> list[Tensor]:
    position = torch.arange(size, dtype=torch.float64, device=DEVICE) / (size - 1)
    return [1 - position, 10 ** (-3 * position)]


def error(found: Tensor, exact: Tensor) -> Tensor:
    return (found.double() - exact).norm() / exact.norm()


def add_errors(worst: dict, values: Tensor, shape: tuple[int, int], level: int, size: float) -> None:
    """Update `worst`, by (level, precision, what), with the errors of one spectrum, shape and size."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    gaussian = (torch.randn(n, len(values), generator=generator, dtype=torch.float64, device=DEVICE) for n in shape)
    left, right = (torch.linalg.qr(one)[0] for one in gaussian)
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)
    gamma = torch.ones(1, dtype=torch.float64, device=DEVICE)
    exact = [x[None] for x in (size * (left * values) @ right.T, gamma, left[:, 0], right[:, 0], size * gradient)]
    given = [x.float() for x in exact]
    method = method_of(PCConfig(level=level))
    target, *_ = method.evaluate(*exact[:4], advance=False)
    target_gradient, _ = method.pull_back(exact[0], exact[4], *exact[1:4])

    def note(precision: str, what: str, value: Tensor) -> None:
        worst[level, precision, what] = max(worst[level, precision, what], value.item())

    note("rounded to bfloat16", "PC(W)", error(target.bfloat16(), target))
    for precision in PRECISIONS:
        method = method_of(PCConfig(level=level, compute_dtype=precision))
        with nullcontext() if ON_GPU else EmulatedGPU():
            # without steps of power iteration, so that errors are those of the polynomial alone
            effective, _, _, _, kept = method.evaluate(*given[:4], advance=False)
            pulled_back = [method.pull_back(given[0], given[4], *given[1:4], of)[0] for of in ((), kept)]
        inside = left.T @ (effective[0].double() - target[0]) @ right  # in the directions of W
        note(precision, "singular values", inside.diagonal().abs().max() / size)
        note(precision, "PC(W)", error(effective, target))
        for one in pulled_back:
            note(precision, "gradient", error(one, target_gradient))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--levels", type=int, nargs="+", default=[2, 4])
    chosen = parser.parse_args()
    worst: dict[tuple[int, str, str], float] = defaultdict(float)
    for level in chosen.levels:
        for columns in (chosen.width, chosen.width * 11 // 4):
            for values in spectra(chosen.width):
                for size in SIZES:
                    add_errors(worst, values, (chosen.width, columns), level, size)
    columns = ("singular values", "PC(W)", "gradient")
    rows = [
        (level, precision, *(f"{worst[level, precision, what]:.1e}" for what in columns))
        for level in chosen.levels
        for precision in (*PRECISIONS, "rounded to bfloat16")
    ]
    print(markdown.table(("level", "precision", *columns), rows), end="")


if __name__ == "__main__":
    main()
