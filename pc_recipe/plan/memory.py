"""Estimates a run's memory without a GPU."""

import math
from dataclasses import dataclass
from functools import cache

import torch

from pc import skeleton
from pc.api import attach
from pc.config import PCConfig
from pc.method import method_of
from pc.splits import WeightSplit
from pc.step import KEPT_BYTES, KEPT_W_BYTES
from pc.weight import Weight, named_weights
from pc_recipe.config import Config
from pc_recipe.config.model_sizes import Flavor, shape_of, weight_shapes
from pc_recipe.config.optimizers import KINDS
from pc_recipe.config.rank_batches import Degrees, RankBatches
from pc_recipe.config.schema import ActivationCheckpoint

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2  # bytes


@dataclass(frozen=True)
class Sizes:
    """Parameter counts of the whole model."""

    total: int
    hidden_matrices: int
    """Weights of the linear layers in transformer blocks, which `optimizer.name` trains."""
    preconditioned: int
    """Weights that PC applies to."""
    block: int
    """One transformer block."""
    outside_blocks: int
    """Embedding, final norm and head."""
    pc_kept: int
    """Bytes that PC's first pass leaves for the second."""


def find_weights(config: Config) -> list[Weight]:
    """The weights that PC applies to, on the meta device; also if the config has it off."""
    tensors = {name: (torch.float32, size) for name, size in weight_shapes(config.model).items()}
    # TorchTitan's own model has the same weights, but takes seconds to import
    model = skeleton.build(tensors, {"head_dim": shape_of(config.model).head_dim})
    attach(model, config.pc.pc_config)
    return [weight for _, weight in named_weights(model)]


def matrices_of(split: WeightSplit) -> list[tuple[int, int, PCConfig]]:
    """(rows, columns, config) of every preconditioned matrix of a weight."""
    alike = [(part.rows, split.columns, part.config) for part in split.parts if part.config for _ in range(part.count)]
    return alike * math.prod(split.stack)


def count_sizes(config: Config) -> Sizes:
    """Count the whole model, not only this process's part."""
    shape = shape_of(config.model)
    counts = {name: math.prod(size) for name, size in weight_shapes(config.model).items()}
    weights = find_weights(config) if config.pc.enable else []
    block = {name: count for name, count in counts.items() if name.startswith("layers.0.")}
    return Sizes(
        total=sum(counts.values()),
        hidden_matrices=shape.n_layers * sum(count for name, count in block.items() if "norm" not in name),
        preconditioned=sum(weight.effective.numel() for weight in weights),
        block=sum(block.values()),
        outside_blocks=sum(counts.values()) - shape.n_layers * sum(block.values()),
        pc_kept=sum(count_kept_bytes(*matrix) for weight in weights for matrix in matrices_of(weight.split)),
    )


@cache
def count_kept_bytes(n: int, m: int, config: PCConfig) -> int:
    """Bytes that PC keeps from one pass over a weight [n, m] for the next, if there is room (`KEPT_BYTES`)."""
    with torch.device("meta"):
        gamma, u, v = (torch.empty(1, size) for size in (1, n, m))
        *_, kept = method_of(config).evaluate(torch.empty(1, n, m), gamma, u, v)
    return sum(tensor.nbytes for tensor in kept)


def estimate_memory(config: Config, dims: Degrees, sizes: Sizes) -> dict[str, float]:
    """GiB per GPU at the peak, by part. The peak is at the start of the last micro-batch's backward pass.

    Not included: fragmentation, the CUDA context and NCCL's buffers (1 to 4 GiB), and the workspace of PC,
    which is used between steps when activations are already freed.
    """
    training, batches = config.training, RankBatches(dims, config.training)
    once = config.parallelism.syncs_once_per_step
    itemsize = BFLOAT16 if training.mixed_precision_param == "bfloat16" else FLOAT32
    tokens = training.local_batch_size * training.seq_len // dims.cp
    model_split = dims.tp * dims.pp
    split = model_split * batches.fsdp_ranks
    block = sizes.block / dims.tp
    if once:
        # All weights of this rank's model part, and the current block's gradient before it is accumulated.
        gathered = sizes.total / model_split + block
    else:
        # The current and the next block, gathered; the block's gradient before the reduce-scatter; and
        # embedding and head, which stay gathered through the forward pass.
        gathered = 3 * block + sizes.outside_blocks / model_split
    shape = shape_of(config.model)
    whole, kept = _count_whole_block(shape), count_kept_per_block(shape, config.activation_checkpoint)
    recomputed = whole if kept < whole else 0  # of the current block
    states = count_state_elements(config, sizes)
    # compiled: the logit and its gradient; else, in float32: the log-softmax, its gradient and the logit's gradient
    per_logit = 2 * itemsize if config.compiles_loss else 3 * FLOAT32
    parts = {
        "weights": FLOAT32 * sizes.total / split,
        "gradients": FLOAT32 * sizes.total / (model_split if once and batches.micro_batches > 1 else split),
        "optimizer": FLOAT32 * states["optimizer"] / split,
        "W beside PC(W)": FLOAT32 * states["W"] / split,
        "gathered": itemsize * gathered,
        "activations": itemsize * tokens * (shape.n_layers * kept + recomputed) / model_split,
        "logits": per_logit * tokens * config.model.vocab_size / dims.tp,
    }
    if config.pc.enable:
        parts["PC's products"] = min(sizes.pc_kept / split, KEPT_BYTES)
        if dims.tp * batches.fsdp_ranks > 1:
            parts["W on its owners"] = min(FLOAT32 * sizes.preconditioned / split, KEPT_W_BYTES)
    return {part: size / GIB for part, size in parts.items()}


def count_state_elements(config: Config, sizes: Sizes) -> dict[str, int]:
    """Elements stored besides the weights that forward passes use: the optimizer's states, and W."""
    others = sizes.total - sizes.hidden_matrices
    return {
        "optimizer": KINDS[config.optimizer.name].states * sizes.hidden_matrices + KINDS["AdamW"].states * others,
        "W": sizes.preconditioned,
    }


def estimate_checkpoint_bytes(config: Config, sizes: Sizes) -> int:
    """Bytes of one resumable checkpoint."""
    return FLOAT32 * (sizes.total + sum(count_state_elements(config, sizes).values()))


def _count_whole_block(shape: Flavor) -> int:
    """Elements per token that a block keeps without activation checkpointing.

    8 vectors of `dim`: the block's input, both norms' outputs, q, k, v, the attention output and the residual after it.
    4 vectors of `ffn_dim`: gate, its activation, up and their product.
    """
    return 8 * shape.dim + 4 * shape.ffn_dim


def count_kept_per_block(shape: Flavor, checkpointing: ActivationCheckpoint) -> float:
    """Elements per token that a block keeps from its forward to its backward pass, averaged over blocks.

    "full" keeps a block's input. "selective" with "op" keeps that, the attention output and every second
    matmul: q, v, gate and down. "selective" with a number n recomputes every n-th block and keeps its input only; other
    blocks keep everything.
    """
    whole = _count_whole_block(shape)
    if checkpointing.mode == "full":
        return shape.dim
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        return 5 * shape.dim + shape.ffn_dim
    if checkpointing.mode == "selective":
        every = max(int(checkpointing.selective_ac_option), 1)
        return ((every - 1) * whole + shape.dim) / every
    return whole
