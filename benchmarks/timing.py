"""Times of functions on this machine, for the benchmarks."""

import time
from collections.abc import Callable

import torch

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
