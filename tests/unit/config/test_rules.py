"""Combinations that cannot work are refused with a sentence that names the key; others are accepted."""

import itertools
import math
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining import schedules
from torchtitan.distributed import pipeline_parallel

from pc.errors import UserError
from pc.maps import LEVEL_NAMES
from pc_recipe.config import Config, rules
from pc_recipe.config.inheritance import validated
from pc_recipe.config.rank_batches import Degrees
from pc_recipe.config.schema import PipelineSchedule
from pc_recipe.train.upstream_config import JobConfig

pytestmark = pytest.mark.fast

ONE = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1}


def _check(settings: dict, degrees: dict, on_cpu: bool = False) -> None:
    values: dict = {}
    for key, value in ({"training.seq_len": 64, "pc.enable": True} | settings).items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    degrees = ONE | degrees
    dims = Degrees(**degrees, world_size=math.prod(degrees.values()))
    rules.require(validated(values, Config, "here"), dims, on_cpu)


COMPILE = {"compile.enable": True, "compile.components": ["model"], "activation_checkpoint.mode": "none"}
AC_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
FLOAT8 = {"model.converters": ["quantize.linear.float8"]}
EMULATED_FLOAT8 = {**FLOAT8, "quantize.linear.float8.emulate": True}
ZERO_BUBBLE = {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}
ZBV = {**ZERO_BUBBLE, "activation_checkpoint.mode": "full"}
INTERLEAVED = {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
SCHEDULE = {"training.steps": 100, "lr_scheduler.warmup_steps": 5, "lr_scheduler.decay_ratio": 0.5}

REFUSED_ANYWHERE = [
    ({}, {"dp_replicate": 2}, "data_parallel_replicate_degree without sharding averages gradients twice"),
    ({"checkpoint.enable": False, "checkpoint.initial_load_path": "x"}, {}, "without it nothing is loaded"),
    ({"checkpoint.initial_load_in_hf": True}, {}, "initial_load_in_hf = true needs checkpoint.initial_load_path"),
    ({"optimizer.independent_decay": True, "optimizer.lr": 0.0}, {}, "needs optimizer.lr above 0"),
    ({"pc.enable": False, "pc.blocks": ["oo"]}, {}, "'oo' is not a block"),  # a run names its blocks in records
    (
        {"checkpoint.exclude_from_loading": ["optimizer"], "checkpoint.initial_load_path": "x", "checkpoint.enable": True},
        {},
        "exclude_from_loading needs checkpoint.initial_load_model_only = false",
    ),
    ({"quantize.linear.float8.emulate": True}, {}, 'needs model.converters = ["quantize.linear.float8"]'),
    ({"experiment.options": {"power": 1}}, {}, "experiment.options needs experiment.arm"),
    ({"checkpoint.keep_latest_k": 1}, {}, "checkpoint.keep_latest_k = 1 should be 0 (keep all)"),
    *(
        ({**SCHEDULE, **{f"lr_scheduler.{key}": value for key, value in more.items()}}, {}, "never lowers the rate")
        for more in ({"decay_ratio": 0.01}, {"decay_ratio": 0.001}, {"warmup_steps": 99}, {"total_steps": 2})
    ),
    ({"model.n_kv_heads": 2}, {"tp": 4}, "tensor_parallel_degree = 4 should divide the 2 (key-value) heads"),
    ({"model.vocab_size": 257}, {"tp": 2}, "tensor_parallel_degree = 2 should divide model.vocab_size = 257, such as 258"),
    (
        {"model.n_kv_heads": 2, "checkpoint.initial_load_in_hf": True, "checkpoint.initial_load_path": "x", "checkpoint.enable": True},
        {"dp_shard": 4},
        "initial_load_in_hf = true: the 4 ranks that share each weight should divide the 2 (key-value) heads",
    ),
    ({"model.dim": 66}, {}, "model.dim = 66 should be an even multiple of model.n_heads = 4"),
    ({"model.n_kv_heads": 3}, {}, "model.n_kv_heads = 3 should divide model.n_heads = 4"),
    ({"training.seq_len": 60, "model.vocab_size": 300}, {"tp": 3}, "tensor_parallel_degree = 3 should divide the 4 (key-value) heads"),
    ({"training.seq_len": 63}, {"tp": 2}, "training.seq_len = 63 should be a multiple of 4"),
    ({"validation.enable": True, "validation.local_batch_size": 4}, {"pp": 2}, "should be training.local_batch_size = 8"),
    ({**COMPILE, **ZERO_BUBBLE}, {"pp": 2}, "splits the backward pass"),
    ({**AC_OP, **ZERO_BUBBLE}, {"pp": 2}, 'activation_checkpoint.mode = "full"'),
    ({"model.ffn_dim": 65}, {"tp": 2}, "tensor_parallel_degree = 2 should divide model.ffn_dim = 65"),
    ({"parallelism.pipeline_parallel_schedule": "1f1b"}, {}, "pipeline_parallel_schedule = '1f1b' should be '1F1B', "),
    ({"parallelism.pipeline_parallel_microbatch_size": 3}, {"pp": 2}, "local_batch_size = 8 should be a multiple of"),
    ({"training.local_batch_size": 1}, {"pp": 2}, '= 1 makes 1 microbatches (parallelism.pipeline_parallel_microbatch_size); "1F1B"'),
    ({**INTERLEAVED, "training.local_batch_size": 5}, {"pp": 2}, '"Interleaved1F1B" on 2 ranks needs a multiple of 2'),
    ({}, {"pp": 7}, "model.n_layers = 4 is too few for the 7 stages"),
    ({"training.global_batch_size": 12}, {"dp_shard": 2}, "training.global_batch_size = 12 is not a multiple"),
    ({"pc.level": 1.5}, {}, f"pc.level = 1.5 should be {LEVEL_NAMES}, coefficients"),
    ({"pc.level": 9}, {}, f"PC level 9 does not exist; use {LEVEL_NAMES} or a list"),
]  # fmt: skip

REFUSED_ON_CPU = [
    ({"profiling.enable_profiling": True}, {}, "profiling.enable_profiling needs a GPU"),
    ({"checkpoint.async_mode": "async_with_pinned_mem"}, {}, "async_with_pinned_mem"),
    ({}, {"cp": 2}, "context_parallel_degree needs a GPU"),
]  # fmt: skip

ACCEPTED = [
    ({**SCHEDULE, "lr_scheduler.decay_ratio": 0.02}, {}),
    ({**SCHEDULE, "lr_scheduler.decay_ratio": 0.0}, {}),
    ({}, {}),
    ({}, {"dp_replicate": 2, "dp_shard": 2}),
    ({}, {"dp_shard": 2, "tp": 2, "pp": 2}),
    (EMULATED_FLOAT8, {"dp_shard": 2, "tp": 2}),
    ({**COMPILE, **INTERLEAVED}, {"pp": 2}),
    (ZBV, {"pp": 2}),
    ({**COMPILE, **AC_OP}, {"tp": 2}),
    ({**COMPILE, **AC_OP}, {"dp_shard": 2, "pp": 2}),
]


@pytest.mark.parametrize("settings, degrees, sentence", REFUSED_ANYWHERE, ids=lambda value: str(value)[:40])
def test_refused_anywhere(settings, degrees, sentence):
    with pytest.raises(UserError) as error:
        _check(settings, degrees)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings, degrees, sentence", REFUSED_ON_CPU, ids=lambda value: str(value)[:40])
def test_refused_only_on_a_cpu(settings, degrees, sentence):
    _check(settings, degrees)
    with pytest.raises(UserError) as error:
        _check(settings, degrees, on_cpu=True)
    assert sentence in str(error.value)


@pytest.mark.parametrize("settings, degrees", ACCEPTED, ids=str)
def test_accepted(settings, degrees):
    _check(settings, degrees, on_cpu=True)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_are_refused_where_torchtitan_refuses_them(schedule, monkeypatch):
    monkeypatch.setattr(pipeline_parallel, "pipeline_module_split", lambda *_: ([], []))
    monkeypatch.setattr(pipeline_parallel, "build_pipeline_schedule", lambda *_: None)
    found = set()
    for layers, ranks in itertools.product((1, 2, 3, 4, 7), (2, 3, 4, 5)):
        config = Config()
        config.model.n_layers, settings = layers, config.parallelism
        settings.pipeline_parallel_schedule = schedule
        dims = SimpleNamespace(pp=ranks, get_mesh=lambda _: None)
        job = JobConfig(config)
        try:
            pipeline_parallel.pipeline_llm(None, dims, job, None, config.model, None, None)
            expected = False
        except ValueError:
            expected = True
        refused = any(rules._split_into_stages(config, ranks))
        assert refused == expected, (layers, ranks)
        found.add(refused)
    assert found == {True, False}


def _stage(index, count, ranks, shape_of_v):
    at = {other: min(other, count - 1 - other) if shape_of_v else other % ranks for other in range(count)}
    stage = {"num_stages": count, "group_size": ranks, "group_rank": 0, "stage_index": index, "has_backward": True}
    ends = {"is_first": index == 0, "is_last": index == count - 1, "stage_index_to_group_rank": at}
    return mock.MagicMock(**stage, **ends, device=torch.device("cpu"))


@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
def test_microbatches_are_refused_where_torch_refuses_them(schedule):
    kind = schedules.get_schedule_class(schedule)
    several, shape_of_v = issubclass(kind, schedules.PipelineScheduleMulti), schedule == "ZBVZeroBubble"
    for ranks, microbatches in itertools.product((2, 3, 4), range(1, 13)):
        count = ranks * (2 if several else 1)
        indices = (0, count - 1) if shape_of_v else range(0, count, ranks)
        stages = [_stage(index, count, ranks, shape_of_v) for index in indices]
        try:
            kind(stages if several else stages[0], microbatches, loss_fn=lambda *_: 0, scale_grads=False)
            expected = False
        except ValueError:
            expected = True
        config = Config()
        config.parallelism.pipeline_parallel_schedule = schedule
        assert bool([*rules._in_rounds(config, ranks, microbatches)]) == expected, (ranks, microbatches)
