"""The training loss: cross entropy of full logits, or in chunks of tokens without full logits."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX, LossFunction, cross_entropy_loss
from torchtitan.distributed import ParallelDims

from pc.settings import Config

# Maximum number of logits in a chunk: 256 MiB in bfloat16, about 4,000 tokens at a vocabulary of 32,000. Each chunk
# reads and writes the head's float32 gradient: at 1B with 8 chunks per micro-batch 6 GB, about 2 ms on an H100.
CHUNK_LOGITS = 2**27


class HeadInput(NamedTuple):
    """What a `DeferredHead` returns in training instead of logits."""

    states: Tensor
    """[B, S, dim]"""
    head: nn.Linear
    """its weight [vocab_size, dim] stays gathered by FSDP until the backward pass"""


class DeferredHead(nn.Linear):
    """An output head that leaves the logits to the loss in training. Without gradients it is a plain linear layer."""

    def forward(self, x: Tensor) -> Tensor | HeadInput:
        """[B, S, dim] to logits [B, S, vocab_size], or to the input of `chunked_cross_entropy`."""
        if self.training and torch.is_grad_enabled():
            return HeadInput(x, self)
        return super().forward(x)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of a head's logits, one chunk of tokens at a time.

    The forward pass also computes the gradients, so full logits never exist and no logit is computed twice. As with
    full logits, matmuls use the inputs' dtype and the cross entropy at least float32. The loss and the weight's
    gradient are also accumulated in at least float32. (Torch 2.13's `linear_cross_entropy` accumulates both in the
    inputs' dtype: in bfloat16 its loss of 8,192 tokens had an error of 4e-3, docs/performance.md.)
    """

    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, labels: Tensor, chunks: int, of_chunk: Callable) -> Tensor:
        """Args: states [T, dim]; weight [vocab_size, dim]; labels [T]; number of chunks; `loss_and_gradient`."""
        precision = torch.promote_types(states.dtype, torch.float32)
        loss = torch.zeros((), dtype=precision, device=states.device)
        d_states = torch.empty_like(states)
        d_weight = torch.zeros_like(weight, dtype=precision)
        parts = (tensor.chunk(chunks) for tensor in (states, labels, d_states))
        for some_states, some_labels, d_some in zip(*parts, strict=True):
            chunk_loss, d_logits = of_chunk(some_states @ weight.T, some_labels)
            loss += chunk_loss
            torch.mm(d_logits, weight, out=d_some)
            d_weight += d_logits.T @ some_states
            del d_logits  # free them before the next chunk
        ctx.save_for_backward(d_states, d_weight)
        return loss

    @staticmethod
    def backward(ctx, gradient: Tensor):
        d_states, d_weight = ctx.saved_tensors
        # In place, so a second backward pass raises an error. As a matrix, so that bfloat16 gradients are multiplied in
        # float32: on a GPU, a 0-dimensional tensor would be rounded first.
        gradient = gradient.reshape(1, 1)
        return d_states.mul_(gradient), d_weight.mul_(gradient).to(d_states.dtype), None, None, None


def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies [] in at least float32, and its gradient [T, vocab_size] in the logits' dtype.

    Args:
        logits: [T, vocab_size].
        labels: [T]; `IGNORE_INDEX` adds nothing.
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(exact, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    is_label = torch.arange(logits.size(-1), device=logits.device) == labels[:, None]
    gradient = (exact.softmax(-1) - is_label.to(exact.dtype)) * (labels != IGNORE_INDEX)[:, None]
    return loss, gradient.to(logits.dtype)


def chunked_cross_entropy(
    prediction: HeadInput, labels: Tensor, *, chunk_logits: int = CHUNK_LOGITS, of_chunk: Callable = loss_and_gradient
) -> Tensor:
    """Sum of the cross entropies of labels [B, S], in equal chunks of at most `chunk_logits` logits."""
    weight = prediction.head.weight
    chunks = math.ceil(labels.numel() * len(weight) / chunk_logits)
    return ChunkedCrossEntropy.apply(prediction.states.flatten(0, 1), weight, labels.flatten(), chunks, of_chunk)


def compiles_loss(config: Config, tensor_parallel: int) -> bool:
    """Whether the loss is compiled: not on logits that tensor parallelism shards.

    Torch 2.13 compiles such a loss correctly only the first time. Loaded from the compiler's cache, by this process or a
    later one, the loss is silently wrong.
    """
    return config.compile.enable and "loss" in config.compile.components and tensor_parallel == 1


def build_loss(job_config: Config, parallel_dims: ParallelDims) -> LossFunction:
    """For TorchTitan's TrainSpec: cross entropy of full logits, or in chunks with `training.chunked_loss`."""
    compiles = compiles_loss(job_config, parallel_dims.tp)

    def compiled(function: Callable) -> Callable:
        return torch.compile(function, backend=job_config.compile.backend) if compiles else function

    of_logits, of_chunk = compiled(cross_entropy_loss), compiled(loss_and_gradient)
    if not job_config.training.chunked_loss:
        return of_logits

    def loss(prediction: Tensor | HeadInput, labels: Tensor) -> Tensor:
        if isinstance(prediction, HeadInput):
            return chunked_cross_entropy(prediction, labels, of_chunk=of_chunk)
        return of_logits(prediction, labels)  # validation

    return loss
