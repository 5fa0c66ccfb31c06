"""The minimum and maximum of every number in the config. Values outside would fail with a traceback, or never end."""

import dataclasses
import typing
from collections.abc import Iterator
from functools import reduce

from pc.titan.config import JobConfig
from pc.titan.optimizer_kinds import KINDS

MANY = 10**9
"""more steps, sequences or items than anyone trains on"""
_DAYS = 10**7  # seconds, 116 days; torch's timeouts overflow above this
_TOKENS = 2**24
_SEEDS = 2**63 - 1

RANGES: dict[str, tuple[float, float]] = {
    "activation_checkpoint.memory_budget": (0, 1),
    "checkpoint.interval": (1, MANY),
    "checkpoint.keep_every": (0, MANY),
    "checkpoint.keep_latest_k": (0, MANY),
    "checkpoint.load_step": (-1, MANY),
    "comm.init_timeout_seconds": (1, _DAYS),
    "comm.trace_buf_size": (0, MANY),
    "comm.train_timeout_seconds": (1, _DAYS),
    "data.seed": (0, _SEEDS),
    "data.validation_sequences": (1, MANY),
    "debug.seed": (0, _SEEDS),
    "evaluation.interval": (0, MANY),
    "evaluation.limit": (0, MANY),
    "health.estimate_freq": (0, MANY),
    "health.freq": (0, MANY),
    "health.spectra_freq": (0, MANY),
    "lr_scheduler.decay_ratio": (0, 1),
    "lr_scheduler.min_lr_factor": (0, 1),
    "lr_scheduler.total_steps": (1, MANY),
    "lr_scheduler.warmup_steps": (0, MANY),
    "metrics.log_freq": (1, MANY),
    "model.init_std": (1e-9, 1e9),
    "model.vocab_size": (1, _TOKENS),
    "optimizer.eps": (0, 1),
    "optimizer.lr": (0, 1e6),
    **{f"optimizer.{key}": limits for kind in KINDS.values() for key, limits in kind.ranges.items()},
    "optimizer.weight_decay": (0, 1e6),
    "parallelism.context_parallel_degree": (1, MANY),
    "parallelism.data_parallel_replicate_degree": (1, MANY),
    "parallelism.data_parallel_shard_degree": (-1, MANY),
    "parallelism.expert_parallel_degree": (1, 1),  # for mixtures of experts; Llama 2 has none
    "parallelism.expert_tensor_parallel_degree": (1, 1),
    "parallelism.pipeline_parallel_degree": (1, MANY),
    "parallelism.pipeline_parallel_first_stage_less_layers": (0, 1000),
    "parallelism.pipeline_parallel_last_stage_less_layers": (0, 1000),
    "parallelism.pipeline_parallel_layers_per_stage": (1, 1000),
    "parallelism.tensor_parallel_degree": (1, MANY),
    "pc.power_iterations": (0, 10_000),
    "profiling.profile_freq": (1, MANY),
    "profiling.profiler_active": (1, MANY),
    "profiling.profiler_warmup": (0, MANY),
    "training.dataloader.num_workers": (0, 1024),
    "training.dataloader.prefetch_factor": (1, 10_000),
    "training.gc_freq": (1, MANY),
    "training.global_batch_size": (-1, MANY),
    "training.local_batch_size": (1, 10**6),
    "training.max_nonfinite_steps": (1, MANY),
    "training.max_norm": (1e-9, 1e9),
    "training.seq_len": (1, _TOKENS),
    "training.steps": (1, MANY),
    "validation.freq": (1, MANY),
    "validation.local_batch_size": (1, 10**6),
}

# Numbers that this trainer does not read, and numbers that are checked elsewhere.
UNUSED = ("fault_tolerance.", "validation.steps", "validation.seq_len", "validation.dataloader.", "memory_estimation.")
CHECKED_ELSEWHERE = (
    "optimizer.beta1",
    "optimizer.beta2",
    "parallelism.pipeline_parallel_microbatch_size",
    "pc.level",
)


def findings(config: JobConfig) -> Iterator[str]:
    """One sentence for each number outside its range."""
    for key, (least, most) in RANGES.items():
        value = reduce(getattr, key.split("."), config)
        if value is None:
            continue  # optional and not set
        if value < least:
            yield f"{key} = {value} should be at least {least:g}"
        elif value > most:
            yield f"{key} = {value} should be at most {most:g}"


def is_within(config: JobConfig, *keys: str) -> bool:
    """Whether these numbers are within their ranges."""
    wrong = [finding.partition(" ")[0] for finding in findings(config)]
    return not any(key in wrong for key in keys)


def numbers(section: type = JobConfig, prefix: str = "") -> Iterator[str]:
    """The keys of all numbers in the config."""
    for name, annotation in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(annotation):
            yield from numbers(annotation, f"{prefix}{name}.")
        elif {annotation, *typing.get_args(annotation)} & {int, float}:
            yield prefix + name
