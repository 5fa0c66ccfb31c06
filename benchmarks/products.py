"""What PC's two passes save beside their readable definitions: CPU time, and kernels and memory traffic at 1B.

    OMP_NUM_THREADS=1 python benchmarks/products.py [--output results/DATE-NAME]

"reference" is power iteration on the weight, Horner's rule in the Gram matrix, and autograd, one matrix after the
other: what tests hold the fast passes equal to.

Time: three matrices of the 271M model, float32, levels 2 and 4, interleaved; the median of the rounds, and the range of
their ratios. Counts: all matrices of a model, level 4, on one owner, with weights on the meta device: the operations
that would be kernels on a GPU, and the bytes that each reads and writes, products included.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pc import PCConfig, attach, effective_weight, named_pc_linears, polynomial
from pc.files import write_atomically
from pc.owner import run_on_owners
from pc.passes import materialise, pull_back
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


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def compare(shape: tuple[int, int], level: int) -> dict:
    config = PCConfig(level=level)
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


class Traffic(TorchDispatchMode):
    """Counts operations that move data, and the bytes of their inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        writes_or_makes = function._schema.is_mutable or not any(r.alias_info for r in function._schema.returns)
        if writes_or_makes and not str(function).startswith(("aten.detach", "aten.empty", "aten._unsafe_view")):
            self.kernels += 1
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            self.bytes += sum(x.nbytes for x in tensors)
        return result


def count(flavor: str) -> dict[str, dict[str, float]]:
    """Kernels and GiB of both passes over all PC matrices of a model."""
    with torch.device("meta"):
        model = attach(Llama2(FLAVORS[flavor]), PCConfig(schedule="step"))
        layers = [(layer.pc_config, layer.weight.detach()) for _, layer in named_pc_linears(model)]
        gamma, vectors = torch.empty(1), [[torch.empty(n) for n in weight.shape] for _, weight in layers]
    keys = [config for config, _ in layers]
    weights = [(weight, gamma, *uv) for (_, weight), uv in zip(layers, vectors, strict=True)]
    gradients = [(weight, torch.empty_like(weight), *rest) for weight, *rest in weights]
    result = {}
    for name, function, items, outputs in (
        ("materialise", materialise, weights, [(w, u, v) for w, _, u, v in weights]),
        ("pull back", pull_back, gradients, [(h, g) for _, h, g, *_ in gradients]),
    ):
        with Traffic() as fast:
            run_on_owners(function, items, outputs, keys)
        reference = {"materialise": materialise_reference, "pull back": pull_back_reference}[name]
        with Traffic() as slow:
            run_on_owners(reference, items, outputs, keys, batch_bytes=0)
        for kind, traffic in (("", fast), (", reference", slow)):
            result[name + kind] = {"kernels": traffic.kernels, "GiB": traffic.bytes / 2**30}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for products.json")
    output = parser.parse_args().output
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
