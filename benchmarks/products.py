"""What PC's two passes save beside their readable definitions: CPU time, and kernels and memory traffic at 1B.

    OMP_NUM_THREADS=1 python benchmarks/products.py [--output results/DATE-NAME]
    python benchmarks/products.py --passes 1B [--output results/DATE-NAME]      # on the GPU where there is one

"reference" is power iteration on the weight, Horner's rule in the Gram matrix, and autograd, one matrix after the
other: what tests hold the fast passes equal to.

Time: three matrices of the 271M model, float32, levels 2 and 4, interleaved; the median of the rounds, and the range of
their ratios. Counts: all matrices of a model, level 4, on one owner, with weights on the meta device: the operations
that would be kernels on a GPU, and the bytes that each reads and writes, products included.

`--passes`: both passes over all matrices of a model, as one owner runs them in training: by precision, matrices one by one and
in batches, beside the references one by one; and their errors against float64 on the same device, a matrix of each shape.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from pc import PCConfig, attach, effective_weight, named_pc_linears, polynomial
from pc.common.files import write_atomically
from pc.owner import BUCKET_BYTES, run_on_owners
from pc.passes import materialise, pull_back
from pc.plan.traffic import of_passes
from pc.spectral import initial_vectors, power_iteration
from pc.titan.llama2 import FLAVORS, Llama2

SHAPES = [(1024, 1024), (2816, 1024), (1024, 2816)]
ROUNDS = 5
Batch = tuple[Tensor, ...]


@torch.no_grad()
def materialise_reference(config: PCConfig, weight: Tensor, gamma: Tensor, u: Tensor, v: Tensor) -> Batch:
    u, v = power_iteration(weight, u, v, config.power_iterations)
    with patch.object(polynomial, "apply", polynomial.apply_by_horner):
        return effective_weight(weight, gamma, u, v, config), u, v


def pull_back_reference(
    config: PCConfig, weight: Tensor, gradient: Tensor, gamma: Tensor, u: Tensor, v: Tensor
) -> Batch:
    with torch.enable_grad(), patch.object(polynomial, "apply", polynomial.apply_by_horner):
        variables = [weight.detach().requires_grad_(), gamma.detach().requires_grad_()]
        return torch.autograd.grad(effective_weight(*variables, u, v, config), variables, gradient)


PRECISIONS = ("tf32", "float32", "bfloat16")


def seconds_of(function: Callable[[], object], device: str) -> float:
    """CPU time of the process, or a GPU's time, launches included."""
    if device == "cpu":
        return cpu_seconds(function)
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def weights_of(flavor: str, device: str) -> tuple[list[Batch], list[Tensor]]:
    """(W, gamma, u, v) of each PC matrix, and gradients."""
    with torch.device("meta"):
        model = attach(Llama2(FLAVORS[flavor]), PCConfig(schedule="step"))
    generator = torch.Generator(device).manual_seed(0)
    items, gradients = [], []
    for name, layer in named_pc_linears(model):
        weight, gradient = (torch.randn(layer.weight.shape, generator=generator, device=device) for _ in range(2))
        u, v = (vector.to(device) for vector in initial_vectors(name, layer.weight.shape))
        items.append((weight, torch.ones(1, device=device), *power_iteration(weight, u, v, 30)))
        gradients.append(gradient)
    return items, gradients


def measure_passes(flavor: str, device: str, rounds: int, write: Callable[[dict], None]) -> None:
    """Fills a record and hands it to `write` after every measurement."""
    items, gradients = weights_of(flavor, device)
    pulled = [(weight, gradient, *rest) for (weight, *rest), gradient in zip(items, gradients, strict=True)]
    results = {
        "materialise": [tuple(torch.empty_like(x) for x in (w, u, v)) for w, _, u, v in items],
        "pull back": [tuple(torch.empty_like(x) for x in (w, gamma)) for w, gamma, *_ in items],
    }
    hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    record = {"torch": torch.__version__, "hardware": hardware, "flavor": flavor, "matrices": len(items)}
    record |= {"rounds": rounds, "seconds": {}, "errors": {}}
    variants = [(precision, batch) for precision in PRECISIONS for batch in (BUCKET_BYTES, 0)] + [("reference", 0)]
    for precision, batch_bytes in variants:
        name = f"{precision}, {'in batches' if batch_bytes else 'one by one'}"
        fast = precision != "reference"
        config = PCConfig(compute_dtype=precision, schedule="step") if fast else PCConfig(schedule="step")
        functions = (materialise, pull_back) if fast else (materialise_reference, pull_back_reference)
        for part, function, inputs in zip(results, functions, (items, pulled), strict=True):
            call = partial(run_on_owners, function, inputs, results[part], [config] * len(items), batch_bytes)
            call()  # warms up
            record["seconds"].setdefault(part, {})[name] = [seconds_of(call, device) for _ in range(rounds)]
            write(record)
    shapes = {item[0].shape: index for index, item in enumerate(items)}
    for precision in PRECISIONS:
        for (n, m), index in shapes.items():
            found, exact = (
                both_passes(PCConfig(compute_dtype=kind, schedule="step"), [x.to(dtype) for x in pulled[index]])
                for kind, dtype in ((precision, torch.float32), ("float32", torch.float64))
            )
            errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
            record["errors"].setdefault(precision, {})[f"{n} x {m}"] = dict(zip(results, errors, strict=True))
        write(record)


def both_passes(config: PCConfig, item: list[Tensor]) -> tuple[Tensor, Tensor]:
    """PC(W) and the gradient of W in float64, for W, gradient, gamma, u, v."""
    weight, gradient, gamma, u, v = (tensor[None] for tensor in item)
    effective, *_ = materialise(config, weight, gamma, u, v)
    return effective.double(), pull_back(config, weight, gradient, gamma, u, v)[0].double()


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def compare(shape: tuple[int, int], level: int) -> dict:
    config = PCConfig(level=level, schedule="step")
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(1, *shape, generator=generator) * 0.02 for _ in range(2))
    gamma = torch.ones(1, 1)
    u, v = (vector[None] for vector in initial_vectors("benchmark", shape))
    u, v = power_iteration(weight, u, v, 100)
    functions = {
        "materialise": partial(materialise, config, weight, gamma, u, v),
        "materialise, reference": partial(materialise_reference, config, weight, gamma, u, v),
        "pull back": partial(pull_back, config, weight, gradient, gamma, u, v),
        "pull back, reference": partial(pull_back_reference, config, weight, gradient, gamma, u, v),
    }
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for index in range(ROUNDS + 1):  # the first warms up
        for name, function in functions.items():
            value = cpu_seconds(function)
            if index:
                seconds[name].append(value)
    ratios = {}
    for name in ("materialise", "pull back"):
        each = [a / b for a, b in zip(seconds[name], seconds[f"{name}, reference"], strict=True)]
        ratios[name] = {"median": statistics.median(each), "smallest": min(each), "largest": max(each)}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"shape": shape, "level": level, "seconds": medians, "ratio to reference": ratios}


def count(flavor: str) -> dict[str, dict[str, float]]:
    """Kernels and GiB of both passes over all PC matrices of a model."""
    with torch.device("meta"):
        model = attach(Llama2(FLAVORS[flavor]), PCConfig(schedule="step"))
    matrices = [(*layer.weight.shape, layer.pc_config) for _, layer in named_pc_linears(model)]
    fast = of_passes(matrices)
    slow = of_passes(matrices, (materialise_reference, pull_back_reference), batch_bytes=0)
    return {
        name + kind: {"kernels": len(traffic.kernels), "GiB": traffic.bytes / 2**30}
        for kind, passes in (("", fast), (", reference", slow))
        for name, traffic in passes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for products.json")
    parser.add_argument(
        "--passes", metavar="FLAVOR", choices=FLAVORS, help="measure both passes of a whole model instead"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    output = chosen.output
    if chosen.passes:
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def write(record: dict) -> None:
            if output:
                write_atomically(output / "passes.json", json.dumps(record, indent=1) + "\n")

        record: dict = {}
        measure_passes(chosen.passes, device, chosen.rounds, lambda found: (record.update(found), write(found)))
        print(json.dumps(record, indent=1))
        return
    content = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "time": [compare(shape, level) for shape in SHAPES for level in (2, 4)],
        "counts": {flavor: count(flavor) for flavor in ("271M", "1B")},
    }
    text = json.dumps(content, indent=1) + "\n"
    print(text, end="")
    if output:
        write_atomically(output / "products.json", text)


if __name__ == "__main__":
    main()
