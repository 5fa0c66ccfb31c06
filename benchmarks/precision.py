"""Is lower precision of PC's matmuls harmless? Singular values of PC(W) against float64.

    python benchmarks/precision.py [--output results/DATE-NAME]
    python benchmarks/precision.py --train 200 [--output results/DATE-NAME]

For each shape, spectrum, level and precision, W has known singular values. PC(W) and its vector-Jacobian product are
computed with float32 data and matmuls in that precision, and compared with float64 on the CPU. A GPU uses its own
matmuls. On a CPU TF32 is emulated: before each matmul both factors are rounded to 10 mantissa bits; sums are float32.
(Tensor cores truncate some low bits of their sums, which this does not show.) bfloat16 is the machine's own, with
float32 sums.

A value of 1e-3 in the first column means that no singular value of PC(W) is off by more than a thousandth of the
largest target. The third column is for comparison: FSDP gives the model the effective weight in bfloat16 anyway.

`--train` trains the debug model for so many steps on short sequences with each precision. One more run in float32
splits each batch into two halves, which changes the order of sums: it shows the noise that any change makes.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pc import PCConfig, effective_weight, passes, polynomial
from pc.common import markdown
from pc.common.files import write_atomically
from pc.launch.torchrun import STEPS_ALONE
from pc.passes import materialise, pull_back
from pc.spectral import spectral_norm_estimate
from pc.titan.trainer import PCTrainer, load_config
from timing import DEVICE, ON_GPU, hardware

SHAPES = [(1024, 1024), (1024, 2816)]
LEVELS = [2, 4]
STEPS = 20  # optimizer steps, with ten power iterations each
DEBUG = Path(__file__).resolve().parents[1] / "train_configs" / "debug.toml"
PRECISIONS = ["float32", "tf32", "bfloat16"]


class EmulatedTF32(TorchDispatchMode):
    """Rounds the factors of float32 matmuls to TF32's 10 mantissa bits, to nearest even, where torch may use TF32."""

    PRODUCTS = {torch.ops.aten.mm.default: (0, 1), torch.ops.aten.bmm.default: (0, 1)} | {
        torch.ops.aten.addmm.default: (1, 2),
        torch.ops.aten.baddbmm.default: (1, 2),
    }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.PRODUCTS and torch.backends.cuda.matmul.fp32_precision == "tf32":
            args = list(args)
            for index in self.PRODUCTS[function]:
                args[index] = round_to_tf32(args[index])
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def emulated_tf32() -> Iterator[None]:
    """Nothing on a GPU, which has TF32. Also a decorator."""
    with contextlib.nullcontext() if ON_GPU else EmulatedTF32():
        yield


def round_to_tf32(tensor: Tensor) -> Tensor:
    """float32 values with 10 of 23 mantissa bits."""
    bits = tensor.contiguous().view(torch.int32)
    half_minus_one_and_odd = 0xFFF + ((bits >> 13) & 1)
    return ((bits + half_minus_one_and_odd) & ~0x1FFF).view(torch.float32)


def spectra(size: int) -> dict[str, Tensor]:
    """Singular values in descending order, the largest 1 (float64)."""
    position = torch.arange(size, dtype=torch.float64) / (size - 1)
    return {
        "linear, 1 to 0": 1 - position,  # about that of a square Gaussian matrix at initialisation
        "geometric, 1 to 1e-3": 10 ** (-3 * position),  # a few directions dominate
    }


def with_singular_values(values: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """W [n, m] = U diag(values) V^T in float64, with its leading u [n] and v [m]."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64))[0] for n in shape)
    return (u * values) @ v.T, u[:, 0], v[:, 0]


def errors(shape: tuple[int, int], values: Tensor, level: int, precision: str) -> dict[str, float]:
    weight, u, v = with_singular_values(values, shape)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
    exact = PCConfig(level=level)
    config = PCConfig(level=level, compute_dtype=precision, schedule="step")
    single = [tensor.to(DEVICE, torch.float32) for tensor in (weight, u, v, gradient)]
    with emulated_tf32():
        vectors = single[1:3]
        for _ in range(STEPS):  # from the exact vectors to those of this precision
            effective, *vectors = (x[0] for x in materialise(config, *(x[None] for x in (single[0], *vectors))))
        (pulled_back,) = pull_back(config, *(x[None] for x in (single[0], single[3], *single[1:3])))
    effective, pulled_back, *vectors = (tensor.cpu() for tensor in (effective, pulled_back, *vectors))
    estimate = spectral_norm_estimate(weight, *(vector.double() for vector in vectors))
    expected = polynomial.evaluate(polynomial.resolve(level), values).sort(descending=True).values
    found = torch.linalg.svdvals(effective.double())
    target = effective_weight(weight, None, u, v, exact)
    (target_gradient,) = pull_back(exact, *(x[None] for x in (weight, gradient, u, v)))
    return {
        "largest error of a singular value": ((found - expected).abs().max() / expected[0]).item(),
        "relative error of PC(W)": ((effective.double() - target).norm() / target.norm()).item(),
        "the same of rounding PC(W) to bfloat16": ((target.bfloat16().double() - target).norm() / target.norm()).item(),
        "relative error of the gradient": (
            (pulled_back.double() - target_gradient).norm() / target_gradient.norm()
        ).item(),
        "relative error of the norm": (estimate / values[0] - 1).abs().item(),
    }


# Name: overrides of the debug config.
TRAININGS: dict[str, list[str]] = {
    "float32": [],
    "float32, batch in halves": ["--training.local_batch_size", "8"],
    "tf32": ["--pc.compute_dtype", "tf32"],
    "bfloat16": ["--pc.compute_dtype", "bfloat16"],
}
SETTINGS = [*STEPS_ALONE, "--validation.enable=true", "--metrics.log_freq=1"]
SETTINGS += ["--training.seq_len=64", "--training.local_batch_size=16"]


def train(steps: int, overrides: list[str]) -> dict[str, list[float]]:
    """Losses by step and validation losses of one run."""
    emulated = {function.__name__: emulated_tf32()(function) for function in (materialise, pull_back)}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(passes, **emulated):
        words = ["--training.steps", str(steps), "--validation.freq", str(steps), "--job.dump_folder", folder]
        trainer = PCTrainer(load_config(DEBUG, [*SETTINGS, *words, *overrides]))
        trainer.train()
        trainer.close()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {key: [line[key] for line in lines if key in line] for key in ("loss", "validation_loss")}


def compare_trainings(steps: int) -> dict[str, dict[str, list[float]]]:
    """Train with each precision and print the differences of the losses from float32's."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    dist.init_process_group("nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {name: train(steps, overrides) for name, overrides in TRAININGS.items()}
    dist.destroy_process_group()
    rows = []
    for name, losses in found.items():
        pairs = zip(losses["loss"], found["float32"]["loss"], strict=True)
        differences = [abs(loss / reference - 1) for loss, reference in pairs]
        figures = [f"{value:.1e}" for value in (max(differences), statistics.median(differences))]
        rows.append([name, f"{losses['validation_loss'][-1]:.5f}", *figures])
    header = ["PC's matmuls", "validation loss", "largest relative difference of a step's loss from float32", "median"]
    print(markdown.table(header, rows), end="")
    return found


def about() -> dict[str, str]:
    """Versions and hardware of the figures."""
    return {"torch": torch.__version__, "hardware": hardware() + ("" if ON_GPU else ", TF32 emulated")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for precision.json")
    parser.add_argument("--train", type=int, metavar="STEPS", help="train the debug model with each precision instead")
    arguments = parser.parse_args()
    output = arguments.output
    if arguments.train:
        content = {**about(), "steps": arguments.train, "runs": compare_trainings(arguments.train)}
        if output:
            write_atomically(output / "precision-training.json", json.dumps(content, indent=1) + "\n")
        return
    rows = []
    for shape in SHAPES:
        for spectrum, values in spectra(min(shape)).items():
            for level in LEVELS:
                for precision in PRECISIONS:
                    found = errors(shape, values, level, precision)
                    rows.append({"shape": shape, "spectrum": spectrum, "level": level, "precision": precision, **found})
                    if len(rows) == 1:
                        print(markdown.table(list(rows[0]), []), end="")
                    cells = [f"{cell:.2e}" if isinstance(cell, float) else cell for cell in rows[-1].values()]
                    print(markdown.row(cells), end="", flush=True)
    if output:
        content = {**about(), "rows": rows}
        write_atomically(output / "precision.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
