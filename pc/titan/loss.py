"""The training loss: cross entropy of whole logits, or chunk by chunk of tokens from the head's input."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX, LossFunction, build_cross_entropy_loss
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from pc.titan.config import JobConfig


class HeadInput(NamedTuple):
    """What a `DeferredHead` returns in training, in place of logits."""

    states: Tensor
    """[B, S, dim]"""
    head: nn.Linear
    """whose weight [vocab_size, dim] FSDP has gathered until the backward pass"""


class DeferredHead(nn.Linear):
    """An output head that leaves the logits to the loss while it trains. Without gradients it is a plain one."""

    def forward(self, x: Tensor) -> Tensor | HeadInput:
        """[B, S, dim] to logits [B, S, vocab_size], or to what `chunked_cross_entropy` makes a loss of."""
        if self.training and torch.is_grad_enabled():
            return HeadInput(x, self)
        return super().forward(x)


def chunked_cross_entropy(prediction: HeadInput, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of labels [B, S]; torch takes as many tokens at a time as keep memory small.

    Gradients are made along with the loss, so the logits are never whole, and not made twice.
    """
    return F.linear_cross_entropy(
        prediction.states.flatten(0, 1),
        prediction.head.weight,
        labels.flatten(0, 1),
        reduction="sum",
        ignore_index=IGNORE_INDEX,
        options=nn.LinearCrossEntropyOptions(),
    )


def _asks_to_compile(config: JobConfig) -> bool:
    return config.compile.enable and "loss" in config.compile.components


def compiles_loss(config: JobConfig, tensor_parallel: int) -> bool:
    """Whether a loss of whole logits is compiled: not where tensor parallelism shards them (`build_loss`)."""
    sharded_logits = tensor_parallel > 1 and not config.parallelism.disable_loss_parallel
    return _asks_to_compile(config) and not sharded_logits


def build_loss(job_config: JobConfig, parallel_dims: ParallelDims) -> LossFunction:
    """For TorchTitan's TrainSpec: cross entropy, compiled where [compile] names it, but not on sharded logits.

    Torch 2.13 compiles a loss on logits that tensor parallelism shards rightly once; from the compiler's cache, in
    this process or a later one, the loss comes out wrong, in silence.
    """
    if _asks_to_compile(job_config) and not compiles_loss(job_config, parallel_dims.tp):
        logger.warning("The loss is not compiled: under tensor parallelism torch's compiler cache makes it wrong")
        components = [name for name in job_config.compile.components if name != "loss"]
        compilation = dataclasses.replace(job_config.compile, components=components)
        job_config = dataclasses.replace(job_config, compile=compilation)
    of_logits = build_cross_entropy_loss(job_config)
    if not job_config.training.chunked_loss:
        return of_logits

    def loss(prediction: Tensor | HeadInput, labels: Tensor) -> Tensor:
        of = chunked_cross_entropy if isinstance(prediction, HeadInput) else of_logits
        return of(prediction, labels)

    return loss
