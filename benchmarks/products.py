"""What fewer products save: PC's pull-back and materialise beside Horner's rule and autograd, in CPU time.

    OMP_NUM_THREADS=1 python benchmarks/products.py [--output results/DATE-NAME]

Two matrices of the 271M model, float32, levels 2 and 4, interleaved; the median of the rounds, and the range of
their ratios. "reference" is `polynomial.apply_by_horner` differentiated by autograd, which is what tests hold
the fast path equal to.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from pc import PCConfig, effective_weight, polynomial
from pc.files import write_atomically
from pc.linear import effective_weight_vjp
from pc.spectral import initial_vectors, power_iteration

SHAPES = [(1024, 1024), (2816, 1024)]
ROUNDS = 5


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

    @torch.no_grad()
    def materialise():
        return effective_weight(weight, gamma, u, v, config)

    def pull_back_by_autograd():
        variables = [weight.detach().requires_grad_(), gamma.detach().requires_grad_()]
        return torch.autograd.grad(effective_weight(*variables, u, v, config), variables, gradient)

    by_horner = patch.object(polynomial, "apply", polynomial.apply_by_horner)
    seconds: dict[str, list[float]] = {}
    for index in range(ROUNDS + 1):  # the first warms up
        with by_horner:
            times = {
                "materialise, reference": cpu_seconds(materialise),
                "pull back, reference": cpu_seconds(pull_back_by_autograd),
            }
        times["materialise"] = cpu_seconds(materialise)
        times["pull back"] = cpu_seconds(lambda: effective_weight_vjp(weight, gamma, u, v, gradient, config))
        times["power iteration, 10 steps"] = cpu_seconds(lambda: power_iteration(weight, u, v, 10))
        for name, value in times.items() if index else ():
            seconds.setdefault(name, []).append(value)
    ratios = {}
    for name in ("materialise", "pull back"):
        each = [a / b for a, b in zip(seconds[name], seconds[f"{name}, reference"], strict=True)]
        ratios[name] = {"median": statistics.median(each), "smallest": min(each), "largest": max(each)}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"shape": shape, "level": level, "seconds": medians, "ratio to reference": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for products.json")
    output = parser.parse_args().output
    rows = [compare(shape, level) for shape in SHAPES for level in (2, 4)]
    text = json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}, indent=1) + "\n"
    print(text, end="")
    if output:
        write_atomically(output / "products.json", text)


if __name__ == "__main__":
    main()
