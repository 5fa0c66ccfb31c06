"""Rules between keys: settings that would train the wrong thing, or fail later in a way that nobody can read."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from pc.errors import UserError
from pc.settings.layout import Degrees, Layout
from pc.settings.models import FLAVORS
from pc.settings.schema import Config

FLOAT8 = "quantize.linear.float8"
_SPLIT_BACKWARD = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")


def require(config: Config, dims: Degrees | None = None, on_cpu: bool = False) -> None:
    """Raise a `UserError` with a line for each finding; without `dims` only those of `of_config`."""
    findings = [*of_config(config), *(of_layout(config, dims, on_cpu) if dims else ())]
    if findings:
        raise UserError("\nerror: ".join(findings))


def refusal_of(function: Callable, *arguments) -> Iterator[str]:
    """What a function's `UserError` says, if it raises one."""
    try:
        function(*arguments)
    except UserError as error:
        yield str(error)


def compiles_model(config: Config) -> bool:
    """Whether transformer blocks are compiled (not only the loss)."""
    return config.compile.enable and "model" in config.compile.components


def of_config(config: Config) -> Iterator[str]:
    """A sentence for each rule that is broken on any number of processes."""
    if config.pc.enable:
        yield from refusal_of(config.pc.to_pc_config)
    checkpoint = config.checkpoint
    for key, needed in (
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
    ):
        if getattr(checkpoint, key) and not getattr(checkpoint, needed):
            yield f"checkpoint.{key} = true needs checkpoint.{needed} = true"
    if config.pc.enable and len({"model", "pc"} & set(checkpoint.exclude_from_loading)) == 1:
        yield (
            f"checkpoint.exclude_from_loading = {checkpoint.exclude_from_loading} should name both model and pc or "
            "neither, because the saved weights are PC(W) and W is in pc"
        )
    if config.model.converters:
        if find_spec("torchao") is None:
            yield f'model.converters = ["{FLOAT8}"] needs torchao: pip install torchao'
        if config.pc.enable and config.pc.schedule == "forward":
            yield 'pc.schedule = "forward" would replace the matmuls of float8 layers; use "step"'
    if config.parallelism.fsdp_reshard_after_forward == "always" and config.parallelism.fsdp_sync == "step":
        yield (
            'parallelism.fsdp_sync = "step" keeps weights gathered, but parallelism.fsdp_reshard_after_forward = '
            '"always" frees them; use fsdp_sync = "micro_batch"'
        )


def of_layout(config: Config, dims: Degrees, on_cpu: bool) -> Iterator[str]:
    """A sentence for each rule that is broken on these ranks.

    Args:
        on_cpu: whether it trains on CPUs, which support fewer features.
    """
    if dims.dp_replicate > 1 and dims.dp_shard == 1 and dims.cp == 1:
        yield (
            "parallelism.data_parallel_replicate_degree without sharding averages gradients twice in TorchTitan 0.2.2; "
            "use data_parallel_shard_degree, alone or with it"
        )
    if config.pc.enable and config.pc.schedule == "forward" and dims.tp > 1:
        yield 'pc.schedule = "forward" needs full weights, which tensor parallelism shards; use "step"'
    flavor = FLAVORS[config.model.flavor]
    heads, kind = (flavor.n_kv_heads, "key-value heads") if flavor.n_kv_heads else (flavor.n_heads, "heads")
    if heads % dims.tp:
        yield f"parallelism.tensor_parallel_degree = {dims.tp} should divide the {heads} {kind}"
    if config.evaluation.interval and (dims.pp > 1 or dims.cp > 1):
        yield (
            "evaluation.interval works with data and tensor parallelism, not with pipeline or context "
            "parallelism; set it to 0 and score checkpoints with scripts/score.py"
        )
    if config.training.seq_len % (divisor := dims.tp * 2 * dims.cp):
        yield (
            f"training.seq_len = {config.training.seq_len} should be a multiple of {divisor} "
            "(tensor parallel degree x 2 x context parallel degree)"
        )
    if dims.pp > 1:
        yield from _pipeline(config, dims)
    if on_cpu:
        yield from _cpu(config, dims)
    yield from refusal_of(lambda: Layout(dims, config.training).micro_batches)


def _pipeline(config: Config, dims: Degrees) -> Iterator[str]:
    batch, size = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    schedule, checkpointing = config.parallelism.pipeline_parallel_schedule, config.activation_checkpoint
    named = f'parallelism.pipeline_parallel_schedule = "{schedule}"'
    if batch % size:
        yield (
            f"training.local_batch_size = {batch} should be a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size = {size}"
        )
    elif schedule.lower() == "1f1b" and batch // size < dims.pp:
        yield (
            f"{named} needs a micro-batch for each of the {dims.pp} stages, but training.local_batch_size / "
            f"parallelism.pipeline_parallel_microbatch_size is {batch // size}"
        )
    if config.validation.enable and config.validation.local_batch_size != batch:
        yield (
            f"validation.local_batch_size = {config.validation.local_batch_size} should be training.local_batch_size "
            f"= {batch}, because pipeline stages exchange tensors of a fixed shape"
        )
    recomputes_by_operation = (checkpointing.mode, checkpointing.selective_ac_option) == ("selective", "op")
    if schedule.lower() in _SPLIT_BACKWARD and (compiles_model(config) or recomputes_by_operation):
        yield (
            f"{named} splits the backward pass, which neither compiled blocks nor "
            'activation_checkpoint.selective_ac_option = "op" allow; use compile.enable = false and '
            'activation_checkpoint.mode = "full"'
        )


def _cpu(config: Config, dims: Degrees) -> Iterator[str]:
    needs_gpu = {
        "profiling.enable_profiling": config.profiling.enable_profiling,
        "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot,
        'checkpoint.async_mode = "async_with_pinned_mem"': config.checkpoint.async_mode == "async_with_pinned_mem",
        f"parallelism.context_parallel_degree = {dims.cp}": dims.cp > 1,  # no sharding rule for CPU attention
    }
    for key, is_set in needs_gpu.items():
        if is_set:
            yield f"{key} needs a GPU, and this machine has none"
