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
from pc.titan.loss import CHUNK_LOGITS, compiles_loss
from pc.weights import attach, named_weights

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2  # bytes

RESERVE_GIB = 4
"""what the estimate does not include on a GPU: the CUDA context, NCCL's buffers, fragmentation"""


@dataclass(frozen=True)
class Loss:
    """How the head and the loss are computed (`pc.titan.loss`)."""

    is_compiled: bool = True
    is_chunked: bool = False
    shards: int = 1
    """ranks that tensor parallelism shards the logits over"""

    @classmethod
    def of(cls, config: Config) -> "Loss":
        tensor_parallel = config.parallelism.tensor_parallel_degree
        return cls(
            compiles_loss(config, tensor_parallel),
            config.training.chunked_loss,
            1 if config.parallelism.disable_loss_parallel else tensor_parallel,
        )


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
    """`per_gpu` for a run.

    Args:
        dims: the parallel degrees.
        sizes: of the model, if known.
        once: whether weights are gathered and gradients reduced once per step; None: as in the config.
        schedule: "step", "forward" or "plain" (without PC); None: as in the config.
    """
    training, layout = config.training, Layout(dims, config.training)
    return per_gpu(
        sizes or sizes_of_run(config),
        optimizer=config.optimizer.name,
        schedule=schedule or (config.pc.schedule if config.pc.enable else "plain"),
        shards=layout.shards,
        tensor_parallel=dims.tp,
        pipeline_parallel=dims.pp,
        tokens=training.local_batch_size * training.seq_len // dims.cp,
        activation_checkpoint=config.activation_checkpoint,
        compute_bytes=BFLOAT16 if training.mixed_precision_param == "bfloat16" else FLOAT32,
        loss=Loss.of(config),
        gathers_once=gathers_once(config) if once is None else once,
        accumulates=layout.micro_batches > 1,
    )


def optimizer_elements(sizes: Sizes, optimizer: str) -> int:
    others = sizes.total - sizes.hidden_matrices
    return KINDS[optimizer].states * sizes.hidden_matrices + KINDS["AdamW"].states * others


def raw_elements(sizes: Sizes, schedule: str) -> int:
    """Schedule "step" stores raw W in addition to the effective weight; "forward" stores only raw W."""
    return sizes.preconditioned if schedule == "step" else 0


def per_gpu(
    sizes: Sizes,
    *,
    optimizer: str,
    schedule: str,
    shards: int,
    tensor_parallel: int,
    pipeline_parallel: int,
    tokens: int,
    activation_checkpoint: ActivationCheckpoint,
    compute_bytes: int,
    loss: Loss,
    gathers_once: bool,
    accumulates: bool,
) -> dict[str, float]:
    """GiB per GPU at the peak, which is at the start of the last micro-batch's backward pass.

    Args:
        shards: ranks that FSDP shards a parameter over.
        tokens: of one micro-batch on one GPU.
        activation_checkpoint: TorchTitan's section.
        compute_bytes: bytes per element of activations and gathered parameters.
        loss: how it is computed.
        gathers_once: weights are gathered and gradients reduced once per step (`pc.titan.fsdp_sync`).
        accumulates: a step has several micro-batches.

    Not included: fragmentation, the CUDA context and NCCL's buffers (1 to 4 GiB, `RESERVE_GIB`), and PC's workspace,
    which is used between steps when activations are already freed.
    """
    split = shards * tensor_parallel * pipeline_parallel
    model_split = tensor_parallel * pipeline_parallel
    largest_block = sizes.largest_block / tensor_parallel
    if gathers_once:
        # All weights of this rank's model part, and the current block's gradient before it is accumulated.
        gathered = sizes.total / model_split + largest_block
    else:
        # The current and the next block, gathered; the block's gradient before the reduce-scatter; and
        # embedding and head, which stay gathered through the forward pass.
        gathered = 3 * largest_block + sizes.outside_blocks / model_split
    elements = {
        "weights": FLOAT32 * sizes.total / split,
        "gradients": FLOAT32 * sizes.total / (model_split if gathers_once and accumulates else split),
        "optimizer": FLOAT32 * optimizer_elements(sizes, optimizer) / split,
        "raw W": FLOAT32 * raw_elements(sizes, schedule) / split,
        "gathered": compute_bytes * gathered,
        "activations": _activations(sizes, tokens, activation_checkpoint, compute_bytes) / model_split,
        "logits": _bytes_of_logits(sizes, tokens, loss, compute_bytes),
    }
    return {part: size / GIB for part, size in elements.items()}


def _bytes_of_logits(sizes: Sizes, tokens: int, loss: Loss, compute_bytes: int) -> float:
    """Peak bytes of head and loss."""
    # per logit: itself and its gradient, and a copy of a chunk; float32 values stay in registers
    compiled = (3 if loss.is_chunked else 2) * compute_bytes
    if loss.is_chunked:
        of_chunk = CHUNK_LOGITS * (compiled if loss.is_compiled else 5 * FLOAT32)
        head = sizes.vocabulary * sizes.dim * (FLOAT32 + compute_bytes)  # its gradient, and that of a chunk
        return of_chunk + head + tokens * sizes.dim * compute_bytes
    plain = 3 * FLOAT32  # per logit: the log-softmax, its gradient, and the logit's gradient
    return tokens * sizes.vocabulary * (compiled if loss.is_compiled else plain) / loss.shards


def _activations(sizes: Sizes, tokens: int, checkpointing: ActivationCheckpoint, compute_bytes: int) -> float:
    """Bytes that the blocks keep for the backward pass, plus what the current block recomputes."""
    whole, kept = _whole_block(sizes), kept_per_block(sizes, checkpointing)
    return tokens * compute_bytes * (sizes.layers * kept + (whole if kept < whole else 0))


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


def checkpoint_bytes(sizes: Sizes, *, optimizer: str, schedule: str) -> int:
    """Bytes of one resumable checkpoint."""
    return FLOAT32 * (sizes.total + optimizer_elements(sizes, optimizer) + raw_elements(sizes, schedule))
