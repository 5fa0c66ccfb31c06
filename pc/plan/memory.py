"""Estimates a run's memory without a GPU."""

from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.models.llama3.model.model import Transformer

from pc.settings import Config
from pc.settings.layout import Degrees, Layout
from pc.settings.optimizers import KINDS
from pc.settings.schema import ActivationCheckpoint
from pc.titan.llama2 import model_args_of
from pc.titan.loss import compiles_loss
from pc.weights import attach, named_weights

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2  # bytes

RESERVE_GIB = 4
"""what the estimate does not include on a GPU: the CUDA context, NCCL's buffers, fragmentation"""


@dataclass(frozen=True)
class Sizes:
    """Parameter counts of the whole model."""

    total: int
    hidden_matrices: int
    """weights of the linear layers in transformer blocks, which `optimizer.name` trains"""
    preconditioned: int
    """weights that PC applies to"""
    largest_block: int
    outside_blocks: int
    """embedding, final norm and head"""
    dim: int
    ffn_dim: int
    layers: int
    vocabulary: int


def sizes_of(model: nn.Module) -> Sizes:
    """Counts of a TorchTitan Llama, which may be on the meta device; with PC, after `pc.attach`."""
    blocks = list(model.layers.values())
    per_block = [sum(p.numel() for p in block.parameters()) for block in blocks]
    total = sum(p.numel() for p in model.parameters())
    linears = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    return Sizes(
        total=total,
        hidden_matrices=sum(linear.weight.numel() for linear in linears),
        preconditioned=sum(weight.parameter.numel() for _, weight in named_weights(model)),
        largest_block=max(per_block),
        outside_blocks=total - sum(per_block),
        dim=model.tok_embeddings.embedding_dim,
        ffn_dim=blocks[0].feed_forward.w1.out_features,
        layers=len(blocks),
        vocabulary=model.tok_embeddings.num_embeddings,
    )


def sizes_of_run(config: Config) -> Sizes:
    """Sizes of the whole model, not only this process's part."""
    with torch.device("meta"):
        model = Transformer(model_args_of(config))
    if config.pc.enable:
        attach(model, config.pc.to_pc_config())
    return sizes_of(model)


def gathers_once(config: Config) -> bool:
    """Whether the config wants weights gathered and gradients reduced once per step, if memory allows."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree > 1 or parallelism.fsdp_reshard_after_forward == "always":
        return False
    return parallelism.fsdp_sync in ("auto", "step")


def of_run(
    config: Config,
    dims: Degrees,
    sizes: Sizes | None = None,
    once: bool | None = None,
    schedule: str | None = None,
) -> dict[str, float]:
    """GiB per GPU at the peak, by part. The peak is at the start of the last micro-batch's backward pass.

    Args:
        dims: the parallel degrees.
        sizes: of the model, if known.
        once: whether weights are gathered and gradients reduced once per step; None: as in the config.
        schedule: "step", "forward" or "plain" (without PC); None: as in the config.

    Not included: fragmentation, the CUDA context and NCCL's buffers (1 to 4 GiB, `RESERVE_GIB`), and PC's workspace,
    which is used between steps when activations are already freed.
    """
    training, layout = config.training, Layout(dims, config.training)
    sizes = sizes or sizes_of_run(config)
    once = gathers_once(config) if once is None else once
    itemsize = BFLOAT16 if training.mixed_precision_param == "bfloat16" else FLOAT32
    tokens = training.local_batch_size * training.seq_len // dims.cp
    model_split = dims.tp * dims.pp
    split = model_split * layout.shards
    largest_block = sizes.largest_block / dims.tp
    if once:
        # All weights of this rank's model part, and the current block's gradient before it is accumulated.
        gathered = sizes.total / model_split + largest_block
    else:
        # The current and the next block, gathered; the block's gradient before the reduce-scatter; and
        # embedding and head, which stay gathered through the forward pass.
        gathered = 3 * largest_block + sizes.outside_blocks / model_split
    whole, kept = _whole_block(sizes), kept_per_block(sizes, config.activation_checkpoint)
    recomputed = whole if kept < whole else 0  # of the current block
    states = state_elements(config, sizes, schedule)
    elements = {
        "weights": FLOAT32 * sizes.total / split,
        "gradients": FLOAT32 * sizes.total / (model_split if once and layout.micro_batches > 1 else split),
        "optimizer": FLOAT32 * states["optimizer"] / split,
        "raw W": FLOAT32 * states["raw W"] / split,
        "gathered": itemsize * gathered,
        "activations": itemsize * tokens * (sizes.layers * kept + recomputed) / model_split,
        # per logit: itself and its gradient; or in float32 the log-softmax, its gradient, and the logit's gradient
        "logits": tokens
        * sizes.vocabulary
        * (2 * itemsize if compiles_loss(config, dims.tp) else 3 * FLOAT32)
        / dims.tp,
    }
    return {part: size / GIB for part, size in elements.items()}


def state_elements(config: Config, sizes: Sizes, schedule: str | None = None) -> dict[str, int]:
    """What is stored besides the weights. Schedule "step" stores raw W in addition to the effective weight; "forward"
    stores only raw W, as the weight."""
    schedule = schedule or (config.pc.schedule if config.pc.enable else "plain")
    others = sizes.total - sizes.hidden_matrices
    return {
        "optimizer": KINDS[config.optimizer.name].states * sizes.hidden_matrices + KINDS["AdamW"].states * others,
        "raw W": sizes.preconditioned if schedule == "step" else 0,
    }


def checkpoint_bytes(config: Config, sizes: Sizes) -> int:
    """Bytes of one resumable checkpoint."""
    return FLOAT32 * (sizes.total + sum(state_elements(config, sizes).values()))


def _whole_block(sizes: Sizes) -> int:
    """Elements per token that a block keeps without activation checkpointing.

    8 vectors of `dim`: the block's input, both norms' outputs, q, k, v, the attention output and the residual after it.
    4 vectors of `ffn_dim`: gate, its activation, up and their product.
    """
    return 8 * sizes.dim + 4 * sizes.ffn_dim


def kept_per_block(sizes: Sizes, checkpointing: ActivationCheckpoint) -> float:
    """Elements per token that a block keeps from its forward to its backward pass, averaged over blocks.

    "full" keeps a block's input. "selective" with "op" keeps that, the attention output and every second
    matmul: q, v, gate and down. "selective" with a number n recomputes every n-th block and keeps its input only; other
    blocks keep everything. For "memory_budget" this returns an upper bound: everything.
    """
    whole = _whole_block(sizes)
    if checkpointing.mode == "full":
        return sizes.dim
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        return 5 * sizes.dim + sizes.ffn_dim
    if checkpointing.mode == "selective":
        every = max(int(checkpointing.selective_ac_option), 1)
        return ((every - 1) * whole + sizes.dim) / every
    return whole
