"""Size of attention and FFN outputs before the residual addition, measured inside the forward pass.

The outputs exist only inside a transformer block, which TorchTitan compiles as one graph, so the measuring
is part of that graph: a forward hook adds into a buffer. The hook asks a module attribute whether to
measure, and torch.compile specialises on it: one graph for every block of the model without a trace of the
measuring, and a second one, compiled when first needed, for the steps that measure.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pc.linear import clean_name

# Names of the measured children of a TorchTitan block, with the names they have in metrics.
PARTS = {"attention": "attention", "feed_forward": "ffn"}

# Positions in the buffer.
SUM_OF_SQUARES, COUNT, LARGEST = range(3)


class OutputSizes:
    """Sum of squares, count and largest magnitude of outputs, over the forward passes while it is on.

    Args:
        model_parts: TorchTitan transformers, sharded and compiled as they will be; buffers are added to
            their blocks, which no checkpoint contains. Call before the first forward pass.
    """

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self._measured = {name: module for model in model_parts for name, module in _measured_modules(model)}
        for module in self._measured.values():
            device = next(module.parameters()).device
            module.register_buffer("output_sizes", torch.zeros(3, device=device), persistent=False)
            module.measures_output = False
            module.register_forward_hook(_measure)

    def start(self) -> None:
        """From now on measure, from zero."""
        for module in self._measured.values():
            module.output_sizes.zero_()
            module.measures_output = True

    def stop(self) -> dict[tuple[int, str], Tensor]:
        """Measure no longer; returns {(layer, part): [sum of squares, count, largest]} of this rank."""
        for module in self._measured.values():
            module.measures_output = False
        return {key: module.output_sizes for key, module in self._measured.items()}


def _measured_modules(model: nn.Module) -> Iterator[tuple[tuple[int, str], nn.Module]]:
    for name, module in model.named_modules():
        path = clean_name(name).split(".")
        if len(path) == 3 and path[0] == "layers" and path[2] in PARTS:
            yield (int(path[1]), PARTS[path[2]]), module


def _measure(module: nn.Module, arguments: tuple, output: Tensor) -> None:
    """Forward hook; one function for all modules, so that all blocks share their compiled graphs."""
    if not module.measures_output:
        return
    # Activation checkpointing runs the forward pass again inside the backward pass, where a graph task is
    # running. A compiled graph writes the buffer in its forward part alone.
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        return
    with torch.no_grad():
        values = output.detach().float()
        sizes = module.output_sizes
        sizes[SUM_OF_SQUARES].add_(values.square().sum())
        sizes[COUNT].add_(float(values.numel()))
        sizes[LARGEST].copy_(torch.maximum(sizes[LARGEST], values.abs().amax()))
