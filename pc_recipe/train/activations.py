"""Measures the size of attention and FFN outputs before the residual addition, inside the forward pass.

The outputs exist only inside a transformer block, which TorchTitan compiles as one graph. So the measurement must be
part of that graph: a forward hook adds to a buffer. A module attribute turns the hook on and off, and torch.compile
specialises on it: all blocks share one graph without the measurement and, from the first step that measures, a second
graph with it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pc.targets import clean_name

# Measured children of a TorchTitan block: their names in metrics.
PARTS = {"attention": "attention", "feed_forward": "ffn"}

# Indices into the buffer.
SIZES = ("squares", "count", "largest")
SUM_OF_SQUARES, COUNT, LARGEST = range(len(SIZES))


class OutputSizes:
    """Sum of squares, count and largest magnitude of outputs, over all forward passes between `start` and `stop`.

    Create it before the first forward pass.

    Args:
        model_parts: TorchTitan transformers, after sharding and compiling. Their blocks get non-persistent buffers.
    """

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self._measured: dict[tuple[int, str], Any] = {}
        for name, module in (pair for model in model_parts for pair in model.named_modules()):
            path = clean_name(name).split(".")
            if len(path) == 3 and path[0] == "layers" and path[2] in PARTS:
                self._measured[int(path[1]), PARTS[path[2]]] = module
        for module in self._measured.values():
            device = next(module.parameters()).device
            module.register_buffer("output_sizes", torch.zeros(3, device=device), persistent=False)
            module.measures_output = False
            module.register_forward_hook(_measure)

    @property
    def outputs(self) -> list[tuple[int, str]]:
        """(layer, part) of each measured output of this rank."""
        return list(self._measured)

    def start(self) -> None:
        """Reset to zero and start measuring."""
        if self._measured:
            torch._foreach_zero_(self._buffers())
        for module in self._measured.values():
            module.measures_output = True

    def stop(self) -> Tensor:
        """Stop measuring; returns sum of squares, count and largest magnitude of this rank's outputs, [outputs, 3]."""
        for module in self._measured.values():
            module.measures_output = False
        return torch.stack(self._buffers())

    def _buffers(self) -> list[Tensor]:
        return [module.output_sizes for module in self._measured.values()]


def _measure(module: Any, arguments: tuple, output: Tensor) -> None:
    """Forward hook; one function for all modules, so that all blocks share their compiled graphs."""
    if not module.measures_output:
        return
    # Skip the forward pass that activation checkpointing repeats during backward, where an autograd graph task is
    # running. A compiled graph writes the buffer only in its forward part.
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        return
    with torch.no_grad():
        values = output.detach().float()
        sizes = module.output_sizes
        sizes[SUM_OF_SQUARES].add_(values.square().sum())
        sizes[COUNT].add_(float(values.numel()))
        sizes[LARGEST].copy_(torch.maximum(sizes[LARGEST], values.abs().amax()))
