"""PC's two passes over all matrices of a model, as one owner runs them in training: time and error by precision.

    python benchmarks/products.py --flavor 1B [--output results/DATE-NAME]      # on the GPU if there is one

Errors are against float64 on the same device, for one matrix of each shape.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pc import PCConfig, owner
from pc.methods import method_of
from pc.spectral import initial_vectors, power_iteration
from pc_recipe.config import load_config
from pc_recipe.files.atomic import write_atomically
from pc_recipe.runs.cost import RunCost
from timing import DEVICE, hardware, seconds

CONFIG = Path(__file__).resolve().parents[1] / "train_configs" / "1b_adamw_pc.toml"
PRECISIONS = ("tf32", "float32", "bfloat16")
Item = tuple[Tensor, ...]
"""W, gradient of PC(W), gamma, u and v of one matrix."""


def items_of(flavor: str) -> list[Item]:
    """Random weights and gradients of the shapes of each PC matrix, with settled u and v."""
    run_cost = RunCost(load_config(CONFIG, ["--model.flavor", flavor, "--training.global_batch_size", "4"]), 1)
    generator = torch.Generator(DEVICE).manual_seed(0)
    items = []
    for index, matrix in enumerate(run_cost.matrices):
        weight, gradient = torch.randn(2, matrix.n, matrix.m, generator=generator, device=DEVICE)
        u, v = (vector.to(DEVICE) for vector in initial_vectors(str(index), weight.shape))
        items.append((weight, gradient, torch.ones(1, device=DEVICE), *power_iteration(weight, u, v, 30)))
    return items


def measure(flavor: str, rounds: int) -> Iterator[dict]:
    """Yields the record so far after every precision."""
    items = items_of(flavor)
    inputs = {"write PC(W)": [(w, *rest) for w, _, *rest in items], "pull back": items}
    results = {
        "write PC(W)": [tuple(torch.empty_like(x) for x in (w, u, v)) for w, _, _, u, v in items],
        "pull back": [tuple(torch.empty_like(x) for x in (w, gamma)) for w, _, gamma, *_ in items],
    }
    one_of_each = {item[0].shape: item for item in items}.values()
    record = {"torch": torch.__version__, "hardware": hardware(), "flavor": flavor, "matrices": len(items)}
    record |= {"rounds": rounds, "seconds": {}, "errors": {}}
    for precision in PRECISIONS:
        config = PCConfig(compute_dtype=precision, mode="step")
        method = method_of(config)
        for part, function in (("write PC(W)", method.write), ("pull back", method.pull_back)):
            plan = owner.Plan(inputs[part], results[part], [config] * len(items))
            call = partial(plan.run, lambda _, *tensors, of=function: of(*tensors), inputs[part], results[part])
            call()  # warms up
            record["seconds"].setdefault(part, {})[precision] = [seconds(call) for _ in range(rounds)]
        record["errors"][precision] = {str(tuple(item[0].shape)): errors(config, item) for item in one_of_each}
        yield record


def errors(config: PCConfig, item: Item) -> list[float]:
    """Relative errors of PC(W) and of the gradient of W against float64."""
    exact = both_passes(PCConfig(mode="step"), [tensor.double() for tensor in item])
    return [((a - b).norm() / b.norm()).item() for a, b in zip(both_passes(config, item), exact, strict=True)]


def both_passes(config: PCConfig, item: Item) -> tuple[Tensor, Tensor]:
    """PC(W) and the gradient of W, in float64."""
    weight, gradient, gamma, u, v = (tensor[None] for tensor in item)
    effective, *_ = method_of(config).write(weight, gamma, u, v)
    return effective.double(), method_of(config).pull_back(weight, gradient, gamma, u, v)[0].double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="1B", help="model size (default: 1B)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for passes.json; printed otherwise")
    chosen = parser.parse_args()
    for record in measure(chosen.flavor, chosen.rounds):
        text = json.dumps(record, indent=1) + "\n"
        if chosen.output:
            write_atomically(chosen.output / "passes.json", text)
    print(text, end="")


if __name__ == "__main__":
    main()
