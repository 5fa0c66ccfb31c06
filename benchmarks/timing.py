"""Times of functions on this machine, for the benchmarks."""

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
from torch.multiprocessing import spawn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def hardware() -> str:
    """Name of the GPU, or "CPU"."""
    return torch.cuda.get_device_name() if ON_GPU else "CPU"


def seconds(function: Callable[[], object], on_gpu: bool = ON_GPU) -> float:
    """CPU time of the process, or GPU time including launches."""
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    function()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


def interleaved(
    functions: dict[str, Callable[[], object]], rounds: int, on_gpu: bool = ON_GPU
) -> dict[str, list[float]]:
    """`seconds` of each function in every round, after one round that warms up."""
    measured = [{name: seconds(function, on_gpu) for name, function in functions.items()} for _ in range(rounds + 1)]
    return {name: [times[name] for times in measured[1:]] for name in functions}


def run_on_processes(on_rank: Callable[[int, int, int, int, int, str], None], description: str) -> None:
    """The command of a benchmark on processes of this machine.

    Args:
        on_rank: called with the rank, processes, width and layers of a model, rounds, and an empty folder.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    for name, default in (("--width", 256), ("--layers", 3), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=default)
    chosen = parser.parse_args()
    for processes in chosen.processes:
        with tempfile.TemporaryDirectory() as folder:
            spawn(on_rank, (processes, chosen.width, chosen.layers, chosen.rounds, folder), processes)
