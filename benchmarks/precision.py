"""Errors of PC's two passes in each precision, against float64; on a GPU with its own matmuls.

    python benchmarks/precision.py [--width 2048] [--levels 2 4]
    python benchmarks/precision.py --train 100          # losses of the debug model on the demo text

W [n, m] has known singular values: from 1 to 0 in equal steps, about those of a Gaussian matrix, and from 1 to 1e-3 by
equal factors, where few directions dominate. The table has the largest error over both spectra, square, tall and wide
matrices of half the width, the wide ones in three magnitudes of weights and gradients, a wide one of the whole width, and
square matrices kept from the first pass or computed again. The error of singular values is that of PC(W) along the singular vectors of W,
relative to the largest of W.

The last column has two gradients that were made to be hard for float16: entries that differ by factors of 10^6, and equal
entries, which W adds up in one.

On a CPU a GPU is emulated: factors are rounded in TF32 and float16 to 10 of 23 mantissa bits, what is stored in float16 too,
sums are float32. Tensor cores drop some low bits of their sums, which this does not show.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pc import PCConfig
from pc.maps import LEVELS
from pc.method import method_of
from pc_recipe.pages import markdown
from timing import DEVICE, ON_GPU

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ("float32", "tf32", "float16")
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


def matrices(values: Tensor, shape: tuple[int, int], size: float) -> tuple[Tensor, ...]:
    """W with these singular values times size, u, v, and left and right singular vectors."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    gaussian = (torch.randn(n, len(values), generator=generator, dtype=torch.float64, device=DEVICE) for n in shape)
    left, right = (torch.linalg.qr(one)[0] for one in gaussian)
    return size * (left * values) @ right.T, left[:, 0], right[:, 0], left, right


def gaussian_gradient(shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)


def hard(width: int) -> list[tuple[Tensor, ...]]:
    """W, u, v and a gradient for each of the last column's two cases."""
    shape = (width, width * 11 // 4)
    weight, u, v, *_ = matrices(spectra(width)[1], shape, 1.0)
    spread = gaussian_gradient(shape) * torch.exp(3 * gaussian_gradient(shape[::-1]).T)
    left = torch.full_like(u, width**-0.5)
    left[0] += 1
    left /= left.norm()
    right = torch.full_like(v, len(v) ** -0.5)
    added_up = torch.outer(left, right) + 0.1 * (weight - u[:, None] * (u @ weight))
    u, _, vh = torch.linalg.svd(added_up, full_matrices=False)
    return [
        (weight, *matrices(spectra(width)[1], shape, 1.0)[1:3], spread),
        (added_up, u[:, 0], vh[0], torch.ones_like(weight)),
    ]


def add_errors(
    worst: dict,
    level: int | str,
    weight: Tensor,
    u: Tensor,
    v: Tensor,
    gradient: Tensor,
    basis: tuple[Tensor, ...] = (),
) -> None:
    """Update `worst`, by (level, precision, what), with the errors of one W and gradient; without left and right singular
    vectors as the basis, with those of a hard gradient."""
    gamma = torch.ones(1, dtype=torch.float64, device=DEVICE)
    exact = [x[None] for x in (weight, gamma, u, v, gradient)]
    given = [x.float() for x in exact]
    method = method_of(PCConfig(level=level))
    target, *_ = method.evaluate(*exact[:4], advance=False)
    target_gradient, _ = method.pull_back(exact[0], exact[4], *exact[1:4])

    def note(precision: str, what: str, value: Tensor) -> None:
        worst[level, precision, what] = max(worst[level, precision, what], value.item())

    if basis:
        note("rounded to bfloat16", "PC(W)", error(target.bfloat16(), target))
    for precision in PRECISIONS:
        method = method_of(PCConfig(level=level, compute_dtype=precision))
        with nullcontext() if ON_GPU else EmulatedGPU():
            # without steps of power iteration, so that errors are those of the polynomial alone
            effective, _, _, _, kept = method.evaluate(*given[:4], advance=False)
            pulled_back = [method.pull_back(given[0], given[4], *given[1:4], of)[0] for of in ((), kept)]
        for one in pulled_back:
            note(precision, "gradient" if basis else "hard gradient", error(one, target_gradient))
        if basis:
            left, right = basis
            inside = left.T @ (effective[0].double() - target[0]) @ right  # in the directions of W
            note(precision, "singular values", inside.diagonal().abs().max() / torch.linalg.matrix_norm(weight, 2))
            note(precision, "PC(W)", error(effective, target))


def train(precision: str, steps: int) -> list[float]:
    """The losses of the debug model on the demo text, with two sequences of 64 tokens a step."""
    from pc_recipe.config import load_config
    from pc_recipe.data.demo import make_demo
    from pc_recipe.train.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "job.dump_folder": folder,
            "data.path": make_demo(ROOT / "data" / "demo").folder,
            "training.steps": steps,
            "training.seq_len": 64,
            "training.global_batch_size": 2,
            "lr_scheduler.total_steps": steps,
            "metrics.log_freq": 1,
            "metrics.enable_tensorboard": "false",
            "validation.enable": "false",
            "checkpoint.enable": "false",
            "pc.compute_dtype": precision,
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        trainer = Trainer(load_config(ROOT / "train_configs" / "debug.toml", words))
        with nullcontext() if ON_GPU else EmulatedGPU():
            trainer.train()
        trainer.close()
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    keys = {str(key): key for key in LEVELS}
    parser.add_argument("--levels", choices=keys, nargs="+", default=["2", "4"])
    parser.add_argument("--train", type=int, metavar="STEPS", help="train instead, and print JSON")
    chosen = parser.parse_args()
    if chosen.train:
        from step import start_processes

        start_processes()
        runs = {precision: {"loss": train(precision, chosen.train)} for precision in PRECISIONS}
        print(json.dumps({"torch": torch.__version__, "steps": chosen.train, "runs": runs}, indent=1))
        return
    worst: dict[tuple[int | str, str, str], float] = defaultdict(float)
    half = chosen.width // 2
    wide = (half, half * 11 // 4)
    cases = [((half, half), 1.0), (wide[::-1], 1.0), *((wide, size) for size in SIZES)]
    levels = [keys[level] for level in chosen.levels]
    for level in levels:
        for shape, size in [*cases, ((chosen.width, chosen.width * 11 // 4), 1.0)]:
            for values in spectra(min(shape)):
                weight, u, v, *basis = matrices(values, shape, size)
                add_errors(worst, level, weight, u, v, size * gaussian_gradient(shape), tuple(basis))
        for weight, u, v, gradient in hard(half):
            add_errors(worst, level, weight, u, v, gradient)
    columns = ("singular values", "PC(W)", "gradient", "hard gradient")
    rows = [
        (level, precision, *(f"{worst[level, precision, what]:.1e}" for what in columns))
        for level in levels
        for precision in (*PRECISIONS, "rounded to bfloat16")
    ]
    print(markdown.table(("level", "precision", *columns), rows), end="")


if __name__ == "__main__":
    main()
