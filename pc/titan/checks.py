"""Finds settings that cannot work before the first step; one sentence for each."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from torchtitan.distributed import ParallelDims
from torchtitan.protocols import train_spec

from pc.data.loader import parse_skip
from pc.errors import UserError
from pc.start import require_possible
from pc.titan import ranges
from pc.titan.config import JobConfig
from pc.titan.layout import Layout
from pc.titan.llama2 import FLAVORS
from pc.titan.optimizer_kinds import KINDS

FLOAT8 = "quantize.linear.float8"
"""TorchTitan's converter of linear layers to torchao's float8; its other converters are untested here"""


def check(config: JobConfig, dims: ParallelDims, on_cpu: bool) -> None:
    """Raise a `UserError` with the first finding of `of_config` and `of_layout`."""
    for finding in chain(of_config(config), of_layout(config, dims, on_cpu)):
        raise UserError(finding)


def of_config(config: JobConfig) -> Iterator[str]:
    """Errors that do not depend on the number of processes; each names the key and valid values."""
    yield from _ignored(config)
    yield from _ranges(config)
    yield from _model(config)
    yield from _precision(config)
    yield from _checkpointing(config)
    yield from _names(config)
    yield from _saving(config)
    yield from _converters(config)
    yield from _chunked_loss(config)
    if config.pc.enable:
        yield from _refusal_of(config.pc.to_pc_config)
        loads = config.checkpoint.enable and (
            config.checkpoint.initial_load_path or config.checkpoint.initial_load_in_hf
        )
        if loads and config.pc.start == "preserve":
            yield from _refusal_of(lambda: require_possible(config.pc.to_pc_config()))


def of_layout(config: JobConfig, dims: ParallelDims, on_cpu: bool) -> Iterator[str]:
    """Errors of the config on these processes. `of_config` must have accepted the flavor and the degrees.

    Args:
        dims: the parallel degrees of the run.
        on_cpu: whether it trains on CPUs, which support fewer features.
    """
    yield from _parallelism(config, dims)
    yield from _fsdp_sync(config, dims)
    if dims.pp > 1:
        yield from _pipeline(config, dims)
    if on_cpu:
        yield from _cpu(config, dims)
    yield from _refusal_of(lambda: Layout(dims, config.training).micro_batches)


def _refusal_of(function: Callable, *arguments) -> Iterator[str]:
    try:
        function(*arguments)
    except UserError as error:
        yield str(error)


def compiles_model(config: JobConfig) -> bool:
    """Whether transformer blocks are compiled (not only the loss)."""
    return config.compile.enable and "model" in config.compile.components


# TorchTitan's keys that this trainer does not read, and what replaces them.
_IGNORED = {
    "training.dataset": "data.path",
    "training.dataset_path": "data.path",
    "validation.dataset": "data.validation_path",
    "validation.dataset_path": "data.validation_path",
    "validation.seq_len": "training.seq_len",
    "validation.steps": "data.validation_sequences",
}

# Parts of a checkpoint.
_STATES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state", "method", "pc")


def _value(config: JobConfig, key: str):
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _ignored(config: JobConfig) -> Iterator[str]:
    default = JobConfig()
    for key, instead in _IGNORED.items():
        if _value(config, key) != _value(default, key):
            yield f"{key} is not read by this trainer; set {instead}"
    refused = {
        "fault_tolerance.enable": config.fault_tolerance.enable,
        "checkpoint.create_seed_checkpoint": config.checkpoint.create_seed_checkpoint,
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
        "optimizer.early_step_in_backward": config.optimizer.early_step_in_backward,
    }
    for key, is_set in refused.items():
        if is_set:
            yield f"{key} is not supported, because PC and Muon run code around the optimizer step; use false"
    for module in ("job.custom_config_module", "experimental.custom_args_module"):
        if _value(config, module) and _value(config, module) != _value(default, module):
            yield f"{module} is not read by this trainer; remove it (valid keys are in pc/titan/config.py)"
    if config.parallelism.enable_async_tensor_parallel:
        yield "parallelism.enable_async_tensor_parallel has no effect in torch 2.13 with TorchTitan 0.2.2; use false"
    if config.comm.mode != "default":
        yield f'comm.mode = "{config.comm.mode}" does not train; use "default"'


def _ranges(config: JobConfig) -> Iterator[str]:
    yield from ranges.findings(config)
    for key in ("optimizer.beta1", "optimizer.beta2"):
        if not 0 <= _value(config, key) < 1:
            yield f"{key} = {_value(config, key)} should be at least 0 and below 1"
    profiling = config.profiling
    if profiling.profile_freq < profiling.profiler_active + profiling.profiler_warmup:
        yield (
            f"profiling.profile_freq = {profiling.profile_freq} should be at least profiling.profiler_active + "
            f"profiling.profiler_warmup = {profiling.profiler_active + profiling.profiler_warmup}"
        )
    choices = {"name": tuple(KINDS)}
    for kind in KINDS.values():
        choices |= kind.choices
    for key, allowed in choices.items():
        if (value := getattr(config.optimizer, key)) not in allowed:
            yield f"optimizer.{key} = {value!r} should be one of {', '.join(allowed)}"


def _model(config: JobConfig) -> Iterator[str]:
    # Benchmarks register variants of the model under other names.
    if config.model.name != "pc_llama2" and config.model.name not in train_spec._extra_train_specs:
        yield f'model.name = {config.model.name!r} should be "pc_llama2", the model of this trainer'
    if config.model.flavor not in FLAVORS:
        yield f"model.flavor = {config.model.flavor!r} should be one of {', '.join(FLAVORS)}"
    if config.checkpoint.enable and config.checkpoint.keep_latest_k == 1:
        yield "checkpoint.keep_latest_k = 1 could lose the only complete checkpoint; use 2 or more, or 0 to keep all"


def _parallelism(config: JobConfig, dims: ParallelDims) -> Iterator[str]:
    if dims.dp_replicate > 1 and dims.dp_shard == 1 and dims.cp == 1:
        yield (
            "parallelism.data_parallel_replicate_degree without sharding averages gradients twice in TorchTitan 0.2.2; "
            "use data_parallel_shard_degree, alone or with it"
        )
    if config.pc.enable and config.pc.schedule == "forward" and dims.tp > 1:
        yield 'pc.schedule = "forward" needs full weights, which tensor parallelism shards; use "step"'
    args = FLAVORS[config.model.flavor]
    heads, kind = (args.n_kv_heads, "key-value heads") if args.n_kv_heads else (args.n_heads, "heads")
    if heads % dims.tp:
        yield f"parallelism.tensor_parallel_degree = {dims.tp} should divide the {heads} {kind}"
    if config.evaluation.interval and (dims.pp > 1 or dims.cp > 1):
        yield (
            "evaluation.interval works with data and tensor parallelism, not with pipeline or context "
            "parallelism; set it to 0 and score checkpoints with scripts/score.py"
        )
    if config.training.chunked_loss and (dims.tp > 1 or dims.pp > 1):
        yield (
            "training.chunked_loss works with data and context parallelism, not with tensor or pipeline "
            "parallelism; use false"
        )
    if config.training.seq_len % dims.seq_len_divisor:
        yield (
            f"training.seq_len = {config.training.seq_len} should be a multiple of {dims.seq_len_divisor} "
            "(tensor parallel degree x 2 x context parallel degree)"
        )


def _fsdp_sync(config: JobConfig, dims: ParallelDims) -> Iterator[str]:
    asked = config.parallelism.fsdp_sync
    if asked == "step" and config.parallelism.fsdp_reshard_after_forward == "always":
        yield (
            'parallelism.fsdp_sync = "step" keeps weights gathered, but parallelism.fsdp_reshard_after_forward = '
            '"always" frees them; use fsdp_sync = "auto"'
        )
    if asked in ("step", "replicas_per_step") and dims.pp > 1:
        yield (
            f'parallelism.fsdp_sync = "{asked}" has no effect in pipeline schedules, which gather and reduce in every '
            'pass; use "auto"'
        )


def _pipeline(config: JobConfig, dims: ParallelDims) -> Iterator[str]:
    batch, size = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    schedule = config.parallelism.pipeline_parallel_schedule
    if size < 1 or batch % size:
        yield (
            f"training.local_batch_size = {batch} should be a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size = {size}"
        )
        return
    if schedule.lower() == "1f1b" and batch // size < dims.pp:
        yield (
            f'parallelism.pipeline_parallel_schedule = "{schedule}" needs a micro-batch for each of the {dims.pp} '
            f"stages, but training.local_batch_size / parallelism.pipeline_parallel_microbatch_size is {batch // size}"
        )
    if config.validation.enable and config.validation.local_batch_size != batch:
        yield (
            f"validation.local_batch_size = {config.validation.local_batch_size} should be training.local_batch_size "
            f"= {batch}, because pipeline stages exchange tensors of a fixed shape"
        )
    splits_backward = schedule.lower() in ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
    if splits_backward and compiles_model(config):
        yield (
            f'parallelism.pipeline_parallel_schedule = "{schedule}" splits the backward pass, which compiled blocks '
            "do not allow; use another schedule, or compile.enable = false"
        )
    checkpointing = config.activation_checkpoint
    if splits_backward and checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        yield (
            f'parallelism.pipeline_parallel_schedule = "{schedule}" splits the backward pass, which '
            'activation_checkpoint.selective_ac_option = "op" does not allow; use activation_checkpoint.mode = "full"'
        )


def _names(config: JobConfig) -> Iterator[str]:
    """Names that would otherwise be looked up only later in the run."""
    yield from _refusal_of(parse_skip, config.data.skip)
    module = config.experimental.custom_import
    if module and not _is_importable(module):
        yield f"experimental.custom_import = {module!r} should be the name of a Python module that is installed"
    folder, name = config.checkpoint.folder, config.job.save_config_file
    if folder != "checkpoint":
        yield f"checkpoint.folder = {folder!r} should be checkpoint, where all commands look; see job.dump_folder"
    if name is not None and (not name or Path(name).name != name):
        yield f"job.save_config_file = {name!r} should be the name of a file within job.dump_folder"
    excluded = set(config.checkpoint.exclude_from_loading)
    if config.pc.enable and len(excluded & {"model", "pc"}) == 1:
        yield (
            f"checkpoint.exclude_from_loading = {config.checkpoint.exclude_from_loading} should name both model and pc "
            "or neither, because the saved weights are PC(W) and W is in pc"
        )
    if excluded - set(_STATES):
        yield (
            f"checkpoint.exclude_from_loading = {config.checkpoint.exclude_from_loading} should only name "
            f"{', '.join(_STATES)}"
        )
    if set(config.compile.components) - {"model", "loss"}:
        yield f"compile.components = {config.compile.components} should name model, loss or both"
    if config.compile.enable and config.compile.backend != "inductor":
        from torch._dynamo import list_backends  # takes a second

        if config.compile.backend not in (backends := list_backends(exclude_tags=())):
            yield f"compile.backend = {config.compile.backend!r} should be one of {', '.join(backends)}"
    if config.metrics.enable_wandb and find_spec("wandb") is None:
        yield "metrics.enable_wandb needs wandb: pip install wandb"
    if config.activation_checkpoint.determinism_check not in ("default", "none"):
        yield (
            f"activation_checkpoint.determinism_check = {config.activation_checkpoint.determinism_check!r} should be "
            '"default" or "none"'
        )


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is missing, or it is not a module name
        return False


def _saving(config: JobConfig) -> Iterator[str]:
    """Checkpoint settings that TorchTitan rejects only when it loads or saves, possibly at the end of the run."""
    section = config.checkpoint
    for key, needed in (
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
        ("initial_load_in_hf_quantized", "initial_load_in_hf"),
    ):
        if getattr(section, key) and not getattr(section, needed):
            yield f"checkpoint.{key} = true needs checkpoint.{needed} = true"


def _precision(config: JobConfig) -> Iterator[str]:
    if config.training.dtype != "float32":
        yield 'training.dtype should be "float32", the precision of raw weights; mixed_precision_param may be bfloat16'


def _checkpointing(config: JobConfig) -> Iterator[str]:
    checkpointing = config.activation_checkpoint
    option = checkpointing.selective_ac_option
    if checkpointing.mode == "selective" and option != "op" and not option.isdecimal():
        yield f'activation_checkpoint.selective_ac_option = "{option}" should be "op" or a number of blocks'


def _converters(config: JobConfig) -> Iterator[str]:
    if not config.model.converters:
        return
    if config.model.converters != [FLOAT8]:
        yield f'model.converters = {config.model.converters} should be [] or ["{FLOAT8}"]'
        return
    if find_spec("torchao") is None:
        yield f'model.converters = ["{FLOAT8}"] needs torchao: pip install torchao'
    if config.pc.enable and config.pc.schedule == "forward":
        yield 'pc.schedule = "forward" would replace the matmuls of float8 layers; use "step"'
    if config.quantize.linear.float8.emulate and compiles_model(config):
        yield "quantize.linear.float8.emulate does not compile; use compile.enable = false"


def _chunked_loss(config: JobConfig) -> Iterator[str]:
    if not config.training.chunked_loss:
        return
    if config.model.converters and not any(part in "output" for part in config.quantize.linear.float8.filter_fqns):
        yield 'training.chunked_loss needs a head without float8; add "output" to quantize.linear.float8.filter_fqns'
    if config.parallelism.fsdp_reshard_after_forward == "always":
        yield (
            "training.chunked_loss uses the head's weight after the forward pass, when "
            'parallelism.fsdp_reshard_after_forward = "always" has freed it; use "default"'
        )


def _cpu(config: JobConfig, dims: ParallelDims) -> Iterator[str]:
    if config.model.converters and not config.quantize.linear.float8.emulate:
        yield "quantize.linear.float8 needs a GPU, and this machine has none; emulate = true runs it slowly"
    refused = {
        "profiling.enable_profiling": config.profiling.enable_profiling,
        "training.gc_debug": config.training.gc_debug,
        "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot,
        'parallelism.pipeline_parallel_schedule = "DualPipeV"': (
            config.parallelism.pipeline_parallel_schedule.lower() == "dualpipev"
        ),
        'checkpoint.async_mode = "async_with_pinned_mem"': config.checkpoint.async_mode == "async_with_pinned_mem",
    }
    for key, is_set in refused.items():
        if is_set:
            yield f"{key} needs a GPU, and this machine has none; turn it off"
    checkpointing = config.activation_checkpoint
    recomputes_attention = checkpointing.mode == "full" or (
        checkpointing.mode == "selective" and checkpointing.selective_ac_option != "op"
    )
    if dims.tp > 1 and compiles_model(config) and recomputes_attention:
        yield (
            "activation_checkpoint that recomputes attention, with tensor parallelism and compiled blocks, fails on a "
            'CPU in torch 2.13; use mode = "selective" with selective_ac_option = "op", or compile.enable = false'
        )
    if dims.cp > 1:
        yield "parallelism.context_parallel_degree needs a GPU: PyTorch does not support it for CPU attention; use 1"
