"""Applies PC and TorchTitan's parallelisms to one model, in an order that works."""

from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list, apply_compile, apply_fsdp, apply_tp
from torchtitan.models.llama3.model.model import Transformer

from pc.api import attach
from pc.config import PCConfig
from pc.targets import find
from pc_recipe.config import Config
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.config.rules import compiles_model
from pc_recipe.train.upstream_config import JobConfig

# The operations whose outputs selective checkpointing keeps. TorchTitan's list names only GPU attention kernels. Torch
# 2.13 fails to recompute CPU attention in a compiled block with tensor parallelism.
SAVED_OPERATIONS: set[Any] = _op_sac_save_list | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


class AlwaysSharded(ParallelDims):
    """TorchTitan's ParallelDims with FSDP also on one rank, and with the run's batches.

    TorchTitan trains a single rank without FSDP, under autocast, with numerics that differ from those of many ranks.
    """

    def __init__(self, batches: RankBatches) -> None:
        super().__init__(**asdict(batches.dims), ep=1, etp=1)
        self.batches = batches

    @property
    def fsdp_enabled(self) -> bool:
        return True

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "fsdp" or super()._mesh_exist(name, degree)


def parallelize(model: Transformer, parallel_dims: AlwaysSharded, titan: JobConfig) -> Transformer:
    """Apply tensor and context parallelism, PC, activation checkpointing, compilation per block, FSDP, in this order.

    PC comes before the wrappers that hide linear layers. The model, or one pipeline stage of it, is on the meta device.
    """
    config = titan.ours
    if parallel_dims.tp_enabled:
        apply_tp(
            model,
            parallel_dims.get_mesh("tp"),
            loss_parallel=True,
            enable_float8_tensorwise_tp=False,
            cp_enabled=parallel_dims.cp_enabled,
        )
    if parallel_dims.cp_enabled:
        apply_cp_to_attention_module(
            [block.get_submodule("attention.inner_attention") for block in model.layers.values()],
            parallel_dims.get_mesh("cp"),
            model.model_args.attn_type,
        )
    if config.pc.enable:
        _attach_pc(model, parallel_dims, config.pc.pc_config)
    compile_model = compiles_model(config)
    if config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            titan.activation_checkpoint,
            model_compile_enabled=compile_model,
            op_sac_save_list=SAVED_OPERATIONS,
        )
    if compile_model:
        if parallel_dims.tp_enabled and model.tok_embeddings is not None:
            # Its output is an in-flight async collective. Torch 2.13 loses the gradient of such an input of a compiled
            # block, silently with FSDP, and the embedding would not train. Any operation, such as clone, waits for it.
            model.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.clone())
        apply_compile(model, titan.compile)
    _apply_fsdp(model, parallel_dims, config)
    return model


def _attach_pc(model: nn.Module, parallel_dims: AlwaysSharded, config: PCConfig) -> None:
    """Attach PC to the configured blocks that are on this pipeline stage."""
    if parallel_dims.pp_enabled:
        found = {entry for weight in find(model, config)[0].values() for entry in weight.entries}
        blocks = [entry for entry in config.blocks if entry in found]
        if not blocks:
            return
        config = config.for_blocks(blocks)
    attach(model, config)


def _apply_fsdp(model: nn.Module, parallel_dims: AlwaysSharded, config: Config) -> None:
    """TorchTitan's FSDP2 or HSDP, with sums as reductions."""
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    apply_fsdp(
        model,
        parallel_dims.get_mesh(names),
        param_dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP["float32"],
        pp_enabled=parallel_dims.pp_enabled,
        reshard_after_forward_policy="never" if config.parallelism.syncs_once_per_step else "default",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the tokens of all ranks, so gradients must be summed. TorchTitan requests a sum
            # scaled by 1, which gloo does not support, for which NCCL needs extra copies, and which on one rank copies
            # every gradient.
            module.set_force_sum_reduction_for_comms(True)
            if parallel_dims.dp_replicate * parallel_dims.dp_shard * parallel_dims.cp == 1:
                module.set_gradient_divide_factor(None)  # type: ignore[arg-type]  # its default
