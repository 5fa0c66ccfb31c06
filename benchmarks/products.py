"""Time of PC's two passes by precision, beside that of another checkout.

    python benchmarks/products.py [--flavor 1B] [--precisions tf32]    # on the GPU if there is one
    python benchmarks/products.py --against CHECKOUT --flavor 271M --precisions float32

The matrices of one layer are computed one by one: write PC(W), and pull a gradient back, with and without what the
first pass kept. Variants take turns; "before" is the other checkout, in float32.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from pc.command import exit_on_user_error
from pc.errors import UserError
from pc.method import Method, power_iteration
from pc.spectral import initial_vectors
from pc_recipe.config import load_config
from pc_recipe.files.atomic import write_atomically
from pc_recipe.plan.cost import RunCost
from timing import DEVICE, hardware, interleaved

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "train_configs" / "1b_adamw_pc.toml"
PARTS = ("write PC(W)", "pull back", "pull back, nothing kept")


def method_of(checkout: Path, **settings) -> Method:
    """A method of PC from another checkout's `pc`, which stays apart from ours."""
    ours = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "pc"}
    sys.path.insert(0, str(checkout))
    try:
        module = import_module("pc.config")
        if not Path(module.__file__).resolve().is_relative_to(checkout.resolve()):
            raise UserError(f"--against: no pc in {checkout}")
        config = module.PCConfig(**settings)
        return import_module("pc.method").method_of(config)
    finally:
        sys.path.remove(str(checkout))
        for name in [name for name in sys.modules if name.split(".")[0] == "pc"]:
            del sys.modules[name]
        sys.modules.update(ours)


def inputs_of(shape: tuple[int, int], device: str) -> tuple[Tensor, ...]:
    """W, a gradient of PC(W), gamma and settled u and v, of one matrix."""
    generator = torch.Generator(device).manual_seed(0)
    weight, gradient = torch.randn(2, 1, *shape, generator=generator, device=device)
    u, v = (vector[None].to(device) for vector in initial_vectors("", shape))
    return weight, gradient, torch.ones(1, 1, device=device), *power_iteration(weight, u, v, 30)


def measure(
    methods: dict[str, Method], shapes: list[tuple[int, int]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds by part and variant in every round."""
    items = [inputs_of(shape, DEVICE) for shape in shapes]
    functions = {}
    for name, method in methods.items():

        def write(method: Method) -> None:
            for weight, _, gamma, u, v in items:
                method.evaluate(weight, gamma, u, v)

        def pull_back(method: Method, kept: list) -> None:
            for item, of_item in zip(items, kept, strict=True):
                method.pull_back(*item, of_item)

        kept = [method.evaluate(weight, gamma, u, v)[-1] for weight, _, gamma, u, v in items]
        calls = write, partial(pull_back, kept=kept), partial(pull_back, kept=[()] * len(items))
        functions |= {(part, name): partial(call, method) for part, call in zip(PARTS, calls, strict=True)}
    seconds = interleaved(functions, rounds)
    return {part: {name: seconds[part, name] for name in methods} for part in PARTS}


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="1B", help="model size (default: 1B)")
    parser.add_argument("--level", type=int, default=4)
    parser.add_argument("--precisions", nargs="+", default=["float16", "tf32", "float32"])
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for passes.json; printed otherwise")
    chosen = parser.parse_args()
    overrides = ["--model.flavor", chosen.flavor, "--training.local_batch_size", "1"]
    others = {"before": method_of(chosen.against, level=chosen.level)} if chosen.against else {}
    ours = {name: method_of(ROOT, level=chosen.level, compute_dtype=name) for name in chosen.precisions}
    layer = RunCost(load_config(CONFIG, [*overrides, "--model.n_layers", "1"]), 1).matrices
    seconds = measure(others | ours, [(n, m) for n, m, _ in layer], chosen.rounds)
    record = {"torch": torch.__version__, "hardware": hardware(), "flavor": chosen.flavor, "matrices": len(layer)}
    record |= {"level": chosen.level, "seconds": seconds}
    if others:
        record["ratio to before, median (range)"] = {
            part: {name: _ratios(times[name], times["before"]) for name in ours} for part, times in seconds.items()
        }
    text = json.dumps(record, indent=1) + "\n"
    if chosen.output:
        write_atomically(chosen.output / "passes.json", text)
    print(text, end="")


def _ratios(times: list[float], before: list[float]) -> str:
    each = [a / b for a, b in zip(times, before, strict=True)]
    return f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"


if __name__ == "__main__":
    main()
