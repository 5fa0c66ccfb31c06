"""How much memory a run needs, estimated part by part without a GPU."""

from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.model.model import Transformer

from pc.attach import attach
from pc.linear import named_pc_linears
from pc.titan.config import JobConfig
from pc.titan.layout import Layout
from pc.titan.llama2 import model_args
from pc.titan.loss import CHUNK_LOGITS, compiles_loss
from pc.titan.optimizer_kinds import KINDS

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2  # bytes

RESERVE_GIB = 4
"""what the estimate leaves out on a GPU: the CUDA context, NCCL's buffers, fragmentation"""


@dataclass(frozen=True)
class Loss:
    """How head and loss are computed (`pc.titan.loss`)."""

    is_compiled: bool = True
    is_chunked: bool = False
    shards: int = 1
    """ranks that tensor parallelism spreads the logits over"""

    @classmethod
    def of(cls, config: JobConfig) -> "Loss":
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
    """weights of the linear layers inside blocks, which `optimizer.name` trains"""
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
    """Counts of a TorchTitan Llama (it may lie on the meta device), after `pc.attach` where PC is on."""
    blocks = list(model.layers.values())
    per_block = [sum(p.numel() for p in block.parameters()) for block in blocks]
    total = sum(p.numel() for p in model.parameters())
    linears = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    return Sizes(
        total=total,
        hidden_matrices=sum(linear.weight.numel() for linear in linears),
        preconditioned=sum(layer.weight.numel() for _, layer in named_pc_linears(model)),
        largest_block=max(per_block),
        outside_blocks=total - sum(per_block),
        dim=model.tok_embeddings.embedding_dim,
        ffn_dim=blocks[0].feed_forward.w1.out_features,
        layers=len(blocks),
        vocabulary=model.tok_embeddings.num_embeddings,
    )


def sizes_of_run(config: JobConfig) -> Sizes:
    """Of the whole model, whatever this process has of it."""
    with torch.device("meta"):
        model = Transformer(model_args(config.model.flavor, config.model.vocab_size, config.training.seq_len))
    if config.pc.enable:
        attach(model, config.pc.to_pc_config())
    return sizes_of(model)


def gathers_once(config: JobConfig) -> bool:
    """Whether the config asks for weights gathered and gradients reduced once per step, if memory allows."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree > 1 or parallelism.fsdp_reshard_after_forward == "always":
        return False
    return parallelism.fsdp_sync in ("auto", "step")


def of_run(
    config: JobConfig,
    dims: ParallelDims,
    sizes: Sizes | None = None,
    once: bool | None = None,
    schedule: str | None = None,
) -> dict[str, float]:
    """`per_gpu` for a run of so many processes.

    Args:
        dims: the parallel degrees.
        sizes: of the model, if they are known.
        once: whether weights are gathered and gradients reduced once per step; None: as the config asks.
        schedule: "step", "forward" or "plain" (without PC); None: as the config asks.
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
    """Schedule "step" keeps raw W beside the effective weight; "forward" has only raw W."""
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
        shards: ranks that FSDP spreads a parameter over.
        tokens: of one micro-batch on one GPU.
        activation_checkpoint: TorchTitan's section.
        compute_bytes: of an element of activations and of gathered parameters.
        loss: how it is computed.
        gathers_once: weights are gathered and gradients reduced once per step (`pc.titan.fsdp_sync`).
        accumulates: a step has several micro-batches.

    Fragmentation, the CUDA context and NCCL's buffers (1 to 4 GiB, `RESERVE_GIB`) are left out, and so is PC's work space,
    which is used between steps when activations are gone.
    """
    split = shards * tensor_parallel * pipeline_parallel
    model_split = tensor_parallel * pipeline_parallel
    largest_block = sizes.largest_block / tensor_parallel
    if gathers_once:
        # All weights of this rank's part, and the gradient of the current block before it is added up.
        gathered = sizes.total / model_split + largest_block
    else:
        # The current block and the next one, gathered; the block's gradient before it is reduced; and
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
    """The most that head and loss hold at a time; `benchmarks/loss.py` measures it."""
    # per logit: itself and its gradient, and a copy where a chunk is handed on; what is float32 stays in registers
    compiled = (3 if loss.is_chunked else 2) * compute_bytes
    if loss.is_chunked:
        of_chunk = CHUNK_LOGITS * (compiled if loss.is_compiled else 5 * FLOAT32)
        head = sizes.vocabulary * sizes.dim * (FLOAT32 + compute_bytes)  # its gradient, and what a chunk adds
        return of_chunk + head + tokens * sizes.dim * compute_bytes
    plain = 3 * FLOAT32  # per logit: the log-softmax, its gradient, and that of the logit
    return tokens * sizes.vocabulary * (compiled if loss.is_compiled else plain) / loss.shards


def _activations(sizes: Sizes, tokens: int, checkpointing: ActivationCheckpoint, compute_bytes: int) -> float:
    """Bytes that the blocks keep for the backward pass, and what the current block recomputes."""
    whole, kept = _whole_block(sizes), kept_per_block(sizes, checkpointing)
    return tokens * compute_bytes * (sizes.layers * kept + (whole if kept < whole else 0))


def _whole_block(sizes: Sizes) -> int:
    """Elements per token that a block keeps when it recomputes nothing.

    The block's input, both norms' outputs, q, k, v, the attention's output and the residual between (8 vectors of
    `dim`); gate, its activation, up and their product (4 of `ffn_dim`).
    """
    return 8 * sizes.dim + 4 * sizes.ffn_dim


def kept_per_block(sizes: Sizes, checkpointing: ActivationCheckpoint) -> float:
    """Elements per token that a block keeps from its forward to its backward pass, over all blocks' mean.

    Mode "full" keeps a block's input. "selective" with "op" keeps that, the attention's output and every second
    product: q, v, gate and down; with a number n, whole blocks but every n-th, which keeps its input. For
    "memory_budget" it is what no checkpointing keeps, an upper bound.
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
