"""Memory and time of head and loss, by implementation of the loss.

    OMP_NUM_THREADS=1 python benchmarks/loss.py [--tokens 8192] [--dim 256] [--output results/DATE-NAME]

Forward and backward pass of a head [32000, dim] in bfloat16 and the cross entropy of its logits. "plain" is
TorchTitan's loss, "compiled" the same through torch.compile, as in the configs. "chunked" is `training.chunked_loss`,
compiled or not. "torch's own" is `linear_cross_entropy` with its default chunks, if torch has it (2.13). Error is the
relative error of the loss against float64. GiB is the peak memory without the inputs, with the gradients of head and
states, from torch's record of its allocations. Time on a CPU is CPU time, the median of interleaved rounds.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torchtitan.components.loss import cross_entropy_loss

from pc.common.files import write_atomically
from pc.titan.loss import DeferredHead, chunked_cross_entropy, loss_and_gradient
from timing import DEVICE, ON_GPU, hardware, interleaved

VOCABULARY = 32_000
ROUNDS = 3


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak memory of `function` on the CPU, including memory inside torch's operations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    held = peak = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def peak_bytes_of_gpu(function: Callable[[], object]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() - before


def variants(tokens: int, dim: int, device: str) -> tuple[dict[str, Callable[[], float]], float]:
    """{name: a forward and backward pass that returns the loss}, and the loss in float64."""
    generator = torch.Generator().manual_seed(0)
    head = DeferredHead(dim, VOCABULARY, bias=False, device=device, dtype=torch.bfloat16)
    states = torch.randn(1, tokens, dim, generator=generator).to(device, torch.bfloat16).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (1, tokens), generator=generator).to(device)
    compiled, compiled_chunk = torch.compile(cross_entropy_loss), torch.compile(loss_and_gradient)

    def backward(loss: torch.Tensor) -> float:
        loss.backward()
        states.grad = head.weight.grad = None
        return loss.item()

    functions = {
        "plain": lambda: backward(cross_entropy_loss(F.linear(states, head.weight), labels)),
        "compiled": lambda: backward(compiled(F.linear(states, head.weight), labels)),
        "chunked, not compiled": lambda: backward(chunked_cross_entropy(head(states), labels)),
        "chunked": lambda: backward(chunked_cross_entropy(head(states), labels, of_chunk=compiled_chunk)),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        functions["torch's own"] = lambda: backward(
            F.linear_cross_entropy(states[0], head.weight, labels[0], reduction="sum", options=options)
        )
    exact = DeferredHead(dim, VOCABULARY, bias=False, device="meta", dtype=torch.float64)
    exact.weight = torch.nn.Parameter(head.weight.detach().double())
    return functions, chunked_cross_entropy(exact(states.detach().double()), labels).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--output", type=Path, help="folder for loss.json")
    chosen = parser.parse_args()
    functions, exact = variants(chosen.tokens, chosen.dim, DEVICE)
    times = interleaved(functions, ROUNDS)
    peak = peak_bytes_of_gpu if ON_GPU else peak_bytes
    held = {name: peak(function) for name, function in functions.items()}
    content = {
        "torch": torch.__version__,
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "tokens": chosen.tokens,
        "dim": chosen.dim,
        "error": {name: abs(function() / exact - 1) for name, function in functions.items()},
        "GiB": {name: size / 2**30 for name, size in held.items()},
        "bytes per logit": {name: size / (chosen.tokens * VOCABULARY) for name, size in held.items()},
        "seconds": {name: statistics.median(values) for name, values in times.items()},
    }
    text = json.dumps(content, indent=1) + "\n"
    print(text, end="")
    if chosen.output:
        write_atomically(chosen.output / "loss.json", text)


if __name__ == "__main__":
    main()
