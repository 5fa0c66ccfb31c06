"""The paper's released PC layer against ours on the same matrices: results in float64, and time of ten micro-batches.

    git clone https://github.com/Empath-aln/PC-layer released
    OMP_NUM_THREADS=1 python benchmarks/released_code.py --clone released [--output results/DATE-NAME]

Their layer is loaded from the clone and run unchanged; this project holds no copy. One optimizer step is a power
iteration of ten steps and then, for each micro-batch, a forward and a backward pass through the layer. Theirs evaluates
PC in each of these. Ours (schedule "step") evaluates it once before them and pulls the summed gradient back once.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

import pc
from pc.common.files import write_atomically
from pc.errors import UserError, exit_on_user_error
from pc.spectral import EPSILON
from timing import interleaved

FILE = "torchtitan/pc_layer/pc_layer.py"
SHAPES = [(1024, 1024), (2816, 1024), (1024, 2816)]  # of the 271M model, [out, in]


def load_released(clone: Path) -> ModuleType:
    """The module of the released layer; it needs only torch."""
    file = clone / FILE
    if not file.is_file():
        raise UserError(f"{file}: no such file; --clone should be a clone of github.com/Empath-aln/PC-layer")
    spec = importlib.util.spec_from_file_location("released_pc_layer", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Theirs:
    """One released layer; `gamma` is filled by its first forward pass."""

    def __init__(self, released: ModuleType, linear: nn.Linear, level: int) -> None:
        settings = {"pc_level": level, "pc_norm_type": "sn", "pc_norm_eps": EPSILON, "power_iter": 10}
        settings |= {"recover_w_norm": True, "learnable_gamma": True, "gamma_init_value": 1.0}
        self.layer = released.PCLinear(linear, SimpleNamespace(**settings), 0).to(linear.weight.dtype)

    def start_from(self, u: Tensor, v: Tensor) -> None:
        self.layer.sn_u.copy_(u)
        self.layer.sn_v.copy_(v)

    def step(self, batches: list[Tensor]) -> None:
        self.layer.update_sn_state()
        for batch in batches:
            self.layer(batch).square().sum().backward()


class Ours:
    """One layer in schedule "step"."""

    def __init__(self, linear: nn.Linear, level: int) -> None:
        self.model = pc.attach(
            nn.ModuleDict({"layer": linear}), pc.PCConfig(level=level, blocks=("*layer",), schedule="step")
        )
        self.schedule = pc.schedule(self.model)
        self.layer, self.state = self.model["layer"], self.schedule.weights["layer"]

    def step(self, batches: list[Tensor]) -> None:
        self.schedule.materialise()
        for batch in batches:
            self.layer(batch).square().sum().backward()
        self.schedule.pull_back()
        self.schedule.restore_raw()


def linear_of(shape: tuple[int, int], dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


def differences(released: ModuleType, shape: tuple[int, int], level: int, micro_batches: int) -> dict[str, float]:
    """Largest relative difference of output, gradient of W and gradient of gamma, in float64.

    Both use the singular vectors that ours found: theirs divides them by their norm plus epsilon, which moves s by
    1e-7.
    """
    ours = Ours(linear_of(shape, torch.float64), level)
    theirs = Theirs(released, linear_of(shape, torch.float64), level)
    torch.manual_seed(1)
    batches = [torch.randn(4, shape[1], dtype=torch.float64) for _ in range(micro_batches)]
    theirs.start_from(ours.state.u, ours.state.v)
    theirs.layer.update_sn_state()
    ours.schedule.materialise()
    found = {"u after power iteration": relative(theirs.layer.sn_u, ours.state.u)}
    theirs.start_from(ours.state.u, ours.state.v)
    found["output"] = relative(theirs.layer(batches[0]), ours.layer(batches[0]))
    for batch in batches:
        theirs.layer(batch).square().sum().backward()
        ours.layer(batch).square().sum().backward()
    ours.schedule.pull_back()
    gradients = (theirs.layer.linear.weight.grad, ours.state.weight.grad)
    (last,) = torch.autograd.grad(theirs.layer(batches[-1]).square().sum(), theirs.layer.linear.weight)
    return found | {
        "gradient of W": relative(*gradients),
        "gradient of gamma": relative(theirs.layer.gamma.v.grad, ours.state.gamma.grad),
        "control: gradient without the last micro-batch": relative(gradients[0] - last, gradients[1]),
    }


def relative(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def seconds(released: ModuleType, level: int, micro_batches: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step over all SHAPES in float32, interleaved in each round; "plain" is the layers without PC."""
    plain = [linear_of(shape, torch.float32) for shape in SHAPES]
    theirs = [Theirs(released, linear_of(shape, torch.float32), level) for shape in SHAPES]
    for layer, shape in zip(theirs, SHAPES, strict=True):
        layer.start_from(*(torch.nn.functional.normalize(torch.randn(size), dim=0) for size in shape))
    ours = [Ours(linear_of(shape, torch.float32), level) for shape in SHAPES]
    batches = [[torch.randn(tokens, shape[1]) for _ in range(micro_batches)] for shape in SHAPES]

    def plain_step(linear: nn.Linear, inputs: list[Tensor]) -> None:
        for batch in inputs:
            linear(batch).square().sum().backward()

    steps = {
        "plain": lambda: [plain_step(linear, inputs) for linear, inputs in zip(plain, batches, strict=True)],
        "released": lambda: [layer.step(inputs) for layer, inputs in zip(theirs, batches, strict=True)],
        "ours": lambda: [layer.step(inputs) for layer, inputs in zip(ours, batches, strict=True)],
    }
    return interleaved(steps, rounds, on_gpu=False)


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clone", type=Path, required=True, help="clone of the paper's repository")
    parser.add_argument("--level", type=int, default=4, choices=(1, 2, 3, 4), help="level to time (default: 4)")
    parser.add_argument("--micro-batches", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=16, help="per micro-batch; few, so that PC dominates the time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for released_code.json")
    arguments = parser.parse_args()
    released = load_released(arguments.clone)
    commit = subprocess.run(["git", "-C", arguments.clone, "rev-parse", "HEAD"], capture_output=True, text=True)
    result = {"commit": commit.stdout.strip(), "torch": torch.__version__, "threads": torch.get_num_threads()}

    numbers: dict[str, float] = {}
    for level in (1, 2, 3, 4):
        for shape in ((48, 48), (96, 40), (40, 96)):
            for name, value in differences(released, shape, level, arguments.micro_batches).items():
                choose = min if name.startswith("control") else max
                numbers[name] = choose(numbers.get(name, value), value)
    result["largest_relative_difference"] = numbers
    print("float64, levels 1 to 4, three shapes, largest relative difference (control: smallest):")
    for name, value in numbers.items():
        print(f"  {name:<48} {value:.1e}")

    measured = seconds(released, arguments.level, arguments.micro_batches, arguments.tokens, arguments.rounds)
    shares = [
        (ours - plain) / (theirs - plain)
        for plain, theirs, ours in zip(measured["plain"], measured["released"], measured["ours"], strict=True)
    ]
    result |= {"level": arguments.level, "micro_batches": arguments.micro_batches, "tokens": arguments.tokens}
    result |= {"cpu_seconds": measured, "ours_over_released": shares}
    print(
        f"level {arguments.level}, {arguments.micro_batches} micro-batches, {len(SHAPES)} matrices, CPU seconds per step:"
    )
    for name, values in measured.items():
        print(f"  {name:<10} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    print(f"PC's time, ours / released: {statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})")
    if arguments.output:
        write_atomically(arguments.output / "released_code.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
