"""What PC's two passes save compared with their readable definitions: CPU time, kernels and memory traffic.

    OMP_NUM_THREADS=1 python benchmarks/products.py [--output results/DATE-NAME]
    python benchmarks/products.py --passes 1B [--output results/DATE-NAME]      # on the GPU if there is one

"reference" is power iteration on the weight, Horner's rule in the Gram matrix, and autograd, one matrix at a time;
tests compare the fast passes with it.

Time: three matrices of the 271M model, float32, levels 2 and 4, interleaved; the median of the rounds and the range of
their ratios. Counts: all matrices of a model, level 4, on one owner, with weights on the meta device. Counted are the
operations that would be kernels on a GPU, including matmuls, and the bytes that each reads and writes.

`--passes`: both passes over all matrices of a model, as one owner runs them in training, by precision, one by one and
in batches, next to the references one by one; and their errors against float64 on the same device, for one matrix of
each shape.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
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
from timing import DEVICE, hardware, interleaved, seconds

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


def weights_of(flavor: str) -> tuple[list[Batch], list[Tensor]]:
    """(W, gamma, u, v) of each PC matrix, and gradients."""
    with torch.device("meta"):
        model = attach(Llama2(FLAVORS[flavor]), PCConfig(schedule="step"))
    generator = torch.Generator(DEVICE).manual_seed(0)
    items, gradients = [], []
    for name, layer in named_pc_linears(model):
        weight, gradient = (torch.randn(layer.weight.shape, generator=generator, device=DEVICE) for _ in range(2))
        u, v = (vector.to(DEVICE) for vector in initial_vectors(name, layer.weight.shape))
        items.append((weight, torch.ones(1, device=DEVICE), *power_iteration(weight, u, v, 30)))
        gradients.append(gradient)
    return items, gradients


def measure_passes(flavor: str, rounds: int) -> Iterator[dict]:
    """Yields the record so far after every measurement."""
    items, gradients = weights_of(flavor)
    pulled = [(weight, gradient, *rest) for (weight, *rest), gradient in zip(items, gradients, strict=True)]
    results = {
        "materialise": [tuple(torch.empty_like(x) for x in (w, u, v)) for w, _, u, v in items],
        "pull back": [tuple(torch.empty_like(x) for x in (w, gamma)) for w, gamma, *_ in items],
    }
    record = {"torch": torch.__version__, "hardware": hardware(), "flavor": flavor, "matrices": len(items)}
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
            record["seconds"].setdefault(part, {})[name] = [seconds(call) for _ in range(rounds)]
            yield record
    shapes = {item[0].shape: index for index, item in enumerate(items)}
    for precision in PRECISIONS:
        for (n, m), index in shapes.items():
            found, exact = (
                both_passes(PCConfig(compute_dtype=kind, schedule="step"), [x.to(dtype) for x in pulled[index]])
                for kind, dtype in ((precision, torch.float32), ("float32", torch.float64))
            )
            errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
            record["errors"].setdefault(precision, {})[f"{n} x {m}"] = dict(zip(results, errors, strict=True))
        yield record


def both_passes(config: PCConfig, item: list[Tensor]) -> tuple[Tensor, Tensor]:
    """PC(W) and the gradient of W in float64, for W, gradient, gamma, u, v."""
    weight, gradient, gamma, u, v = (tensor[None] for tensor in item)
    effective, *_ = materialise(config, weight, gamma, u, v)
    return effective.double(), pull_back(config, weight, gradient, gamma, u, v)[0].double()


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
    times = interleaved(functions, ROUNDS, on_gpu=False)
    ratios = {}
    for name in ("materialise", "pull back"):
        each = [a / b for a, b in zip(times[name], times[f"{name}, reference"], strict=True)]
        ratios[name] = {"median": statistics.median(each), "smallest": min(each), "largest": max(each)}
    medians = {name: statistics.median(values) for name, values in times.items()}
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
        for record in measure_passes(chosen.passes, chosen.rounds):
            text = json.dumps(record, indent=1) + "\n"
            if output:
                write_atomically(output / "passes.json", text)
        print(text, end="")
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
