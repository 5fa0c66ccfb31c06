"""Rules between keys: settings that would train the wrong thing, or fail later with an obscure error."""

import math
from collections.abc import Callable, Iterator

from pc.errors import UserError
from pc_recipe.config.model_sizes import shape_of
from pc_recipe.config.rank_batches import Degrees, RankBatches
from pc_recipe.config.schema import Config

FLOAT8 = "quantize.linear.float8"
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""They run microbatches in rounds of equal length, each of about as many as there are ranks."""
_ONE_STAGE_PER_RANK = ("1F1B", "GPipe")
"""The other schedules have two."""


def require(config: Config, dims: Degrees, on_cpu: bool = False) -> None:
    """Raise a `UserError` with a line for each broken rule of `anywhere` and `on_ranks`."""
    if found := [*anywhere(config), *on_ranks(config, dims, on_cpu)]:
        raise UserError("\nerror: ".join(found))


def error_messages(function: Callable, *arguments) -> Iterator[str]:
    """What a function's `UserError` says, if it raises one."""
    try:
        function(*arguments)
    except UserError as error:
        yield str(error)


def compiles_model(config: Config) -> bool:
    """Whether transformer blocks are compiled (not only the loss)."""
    return config.compile.enable and "model" in config.compile.components


def anywhere(config: Config) -> Iterator[str]:
    """A sentence for each rule that is broken on any number of ranks."""
    yield from error_messages(lambda: config.pc.pc_config)  # also a baseline's, whose spectra are of the same blocks
    shape = shape_of(config.model)
    if shape.dim % (2 * shape.n_heads):
        yield f"model.dim = {shape.dim} should be an even multiple of model.n_heads = {shape.n_heads}"
    if shape.n_kv_heads and shape.n_heads % shape.n_kv_heads:
        yield f"model.n_kv_heads = {shape.n_kv_heads} should divide model.n_heads = {shape.n_heads}"
    if config.optimizer.independent_decay and not config.optimizer.lr:
        yield "optimizer.independent_decay = true needs optimizer.lr above 0, which the decay is divided by"
    schedule, steps = config.lr_scheduler, config.lr_scheduler.total_steps or config.training.steps
    decaying = min(round(steps * (schedule.decay_ratio or 0)), max(0, steps - schedule.warmup_steps))
    if schedule.decay_ratio and decaying < 2:  # the first of them has the peak rate
        yield (
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio:g} of {steps} steps, {schedule.warmup_steps} of them of warmup, "
            "never lowers the rate; give at least 2 steps, or 0 for no decay"
        )
    if config.checkpoint.initial_load_path and not config.checkpoint.enable:
        yield "checkpoint.initial_load_path needs checkpoint.enable = true; without it nothing is loaded"
    if config.checkpoint.initial_load_in_hf and not config.checkpoint.initial_load_path:
        yield "checkpoint.initial_load_in_hf = true needs checkpoint.initial_load_path, the Hugging Face folder"
    if (
        config.checkpoint.initial_load_path
        and config.checkpoint.initial_load_model_only
        and config.checkpoint.exclude_from_loading
    ):
        yield "checkpoint.exclude_from_loading needs checkpoint.initial_load_model_only = false; it leaves out whole states"
    given = sorted(config.quantize.linear.float8.model_fields_set)
    if given and FLOAT8 not in config.model.converters:
        yield f'{FLOAT8}.{given[0]} needs model.converters = ["{FLOAT8}"]; without it nothing is in float8'
    if config.experiment.options and not config.experiment.arm:
        yield "experiment.options needs experiment.arm, whose options they are"
    if config.checkpoint.keep_latest_k == 1:
        yield "checkpoint.keep_latest_k = 1 should be 0 (keep all) or at least 2, because the newest may be damaged"


def on_ranks(config: Config, dims: Degrees, on_cpu: bool = False) -> Iterator[str]:
    """A sentence for each rule that is broken on these ranks.

    Args:
        on_cpu: whether they train on CPUs, which support fewer features.
    """
    if dims.dp_replicate > 1 and dims.dp_shard == 1 and dims.cp == 1:
        yield (
            "parallelism.data_parallel_replicate_degree without sharding averages gradients twice in TorchTitan 0.2.2; "
            "use data_parallel_shard_degree, alone or with it"
        )
    shape = shape_of(config.model)
    heads = shape.n_kv_heads or shape.n_heads
    if heads % dims.tp:
        yield f"parallelism.tensor_parallel_degree = {dims.tp} should divide the {heads} (key-value) heads"
    if config.model.ffn_dim and config.model.ffn_dim % dims.tp:
        yield f"parallelism.tensor_parallel_degree = {dims.tp} should divide model.ffn_dim = {config.model.ffn_dim}"
    if (rows := config.model.vocab_size) % dims.tp:  # else torch computes wrong offsets, and cannot save
        yield (
            f"parallelism.tensor_parallel_degree = {dims.tp} should divide model.vocab_size = {rows}, such as "
            f"{math.ceil(rows / dims.tp) * dims.tp}: a model may have unused rows"
        )
    sharers = dims.dp_shard * dims.cp * dims.tp
    if config.checkpoint.initial_load_in_hf and heads % sharers:  # TorchTitan cuts wq and wk into heads
        yield (
            f"checkpoint.initial_load_in_hf = true: the {sharers} ranks that share each weight should divide the "
            f"{heads} (key-value) heads; start on fewer, and continue on any number"
        )
    if config.training.seq_len % (divisor := dims.tp * 2 * dims.cp):
        yield (
            f"training.seq_len = {config.training.seq_len} should be a multiple of {divisor} "
            "(tensor parallel degree x 2 x context parallel degree)"
        )
    yield from error_messages(lambda: RankBatches(dims, config.training).micro_batches)
    yield from _in_pipelines(config, dims.pp) if dims.pp > 1 else ()
    yield from _on_cpus(config, dims) if on_cpu else ()


def _in_pipelines(config: Config, ranks: int) -> Iterator[str]:
    batch, validated = config.training.local_batch_size, config.validation.local_batch_size
    if config.validation.enable and validated not in (batch, -1):  # -1 takes the same
        yield (
            f"validation.local_batch_size = {validated} should be training.local_batch_size = {batch}, because pipeline "
            "stages exchange tensors of a fixed shape"
        )
    schedule, checkpointing = config.parallelism.pipeline_parallel_schedule, config.activation_checkpoint
    saves_operations = (checkpointing.mode, checkpointing.selective_ac_option) == ("selective", "op")
    if schedule in _SPLIT_BACKWARD and (compiles_model(config) or saves_operations):
        yield (
            f'parallelism.pipeline_parallel_schedule = "{schedule}" splits the backward pass; it needs '
            'compile.enable = false and activation_checkpoint.mode = "full"'
        )
    if batch % (size := config.parallelism.pipeline_parallel_microbatch_size):
        yield (
            f"training.local_batch_size = {batch} should be a multiple of "
            f"parallelism.pipeline_parallel_microbatch_size = {size}"
        )
    else:
        yield from _in_rounds(config, ranks, batch // size)
    yield from _split_into_stages(config, ranks)


def _in_rounds(config: Config, ranks: int, microbatches: int) -> Iterator[str]:
    """What torch's schedules demand of the number of microbatches."""
    schedule = config.parallelism.pipeline_parallel_schedule
    least = ranks if schedule == "1F1B" else 1
    rounds = max(1, microbatches // ranks) if schedule in _IN_ROUNDS else 1
    if microbatches < least or microbatches % rounds:
        need = f"{least} or more" if microbatches < least else f"a multiple of {rounds}"
        yield (
            f"training.local_batch_size = {config.training.local_batch_size} makes {microbatches} microbatches "
            f'(parallelism.pipeline_parallel_microbatch_size); "{schedule}" on {ranks} ranks needs {need}'
        )


def _split_into_stages(config: Config, ranks: int) -> Iterator[str]:
    """What TorchTitan's `pipeline_llm` asserts about the number of layers, to which it adds embedding and head."""
    schedule, layers = config.parallelism.pipeline_parallel_schedule, shape_of(config.model).n_layers
    stages = ranks * (1 if schedule in _ONE_STAGE_PER_RANK else 2)
    if layers + 2 < stages:
        yield (
            f"model.n_layers = {layers} is too few for the {stages} stages of parallelism.pipeline_parallel_degree = {ranks} "
            f'with "{schedule}"'
        )


def _on_cpus(config: Config, dims: Degrees) -> Iterator[str]:
    needs_gpu = {
        "profiling.enable_profiling": config.profiling.enable_profiling,
        "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot,
        'checkpoint.async_mode = "async_with_pinned_mem"': config.checkpoint.async_mode == "async_with_pinned_mem",
        "parallelism.context_parallel_degree": dims.cp > 1,  # no sharding rule for CPU attention
    }
    for key in needs_gpu:
        if needs_gpu[key]:
            yield f"{key} needs a GPU, and this machine has none"
