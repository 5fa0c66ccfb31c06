"""Health metrics over ranks against one rank and a float64 SVD of gathered weights."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torchtitan.models.llama3.infra.parallelize import apply_tp

import helpers.tiny  # noqa: F401, ranks need the tiny size
import pc
from helpers.health_model import inputs, job_config, one_rank, transformer
from helpers.ranks import run_ranks
from pc.settings import load_config
from pc.titan.health import HealthMetrics

GLOBAL_BATCH = 12  # divisible by every number of ranks


def _collect(rank: int, layout: str | None, world_size: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics after one step's forward pass, and the singular values of the gathered weights (float64)."""
    model = transformer(layers=2)
    if layout == "tensor":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("shard", "tensor"))
        apply_tp(model, mesh["tensor"], loss_parallel=False, enable_float8_tensorwise_tp=False)
    model = pc.attach(model, pc.PCConfig(power_iterations=3, schedule="step"))
    dims, batch = one_rank(), inputs(0, GLOBAL_BATCH)
    if layout in ("fsdp", "hsdp"):
        shape = (2, world_size // 2) if layout == "hsdp" else (world_size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        dims = SimpleNamespace(world_size=world_size, pp=1)
        batch = batch.chunk(world_size)[rank]
    elif layout == "tensor":
        for _, layer in pc.named_weights(model):
            layer.module.gamma = nn.Parameter(distribute_tensor(layer.gamma, mesh["tensor"], [Replicate()]))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        dims = SimpleNamespace(world_size=world_size, pp=1)
        batch = batch.chunk(2)[rank // (world_size // 2)]
    elif layout == "pipeline":  # rank r has only layer r
        first_stage = transformer(layers=2)
        pc.schedule(pc.attach(first_stage, pc.PCConfig(power_iterations=3, schedule="step"))).materialise()
        del model.layers[str(1 - rank)]
        if rank == 0:
            model.norm = model.output = None
        else:
            model.tok_embeddings = None
            del first_stage.layers["1"]
            first_stage.norm = first_stage.output = None
            batch = first_stage(batch).detach()
        dims = SimpleNamespace(world_size=2, pp=2)
    schedule = pc.schedule(model)
    schedule.materialise()
    health = HealthMetrics(job_config(freq=1, spectra_freq=1), [model], schedule, dims)
    health.start_step(1)
    model(batch)
    metrics = health.collect(1)
    sigma = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "output":
            weight = module.weight.full_tensor() if hasattr(module.weight, "full_tensor") else module.weight
            sigma[name] = torch.linalg.svdvals(weight.detach().double()).tolist()
    return metrics, sigma


@pytest.mark.parametrize("layout, world_size", [("fsdp", 3), ("hsdp", 4), ("tensor", 4), ("pipeline", 2)])
def test_ranks_agree_with_one_rank_and_the_svd(layout, world_size):
    expected, _ = _collect(0, None, 1)
    results = run_ranks(world_size, _collect, layout, world_size)
    for metrics, sigma in results:
        assert metrics.keys() == expected.keys()
        for key, value in expected.items():
            # Float32: a different order of sums, and PC(W) from differently batched matmuls. The estimate's error is a
            # difference of nearly equal numbers.
            tolerance = 2e-6 if "estimate_error" in key else 2e-5 * abs(value)
            assert abs(metrics[key] - value) < tolerance, key
        for name, values in sigma.items():
            condition = values[0] / (sum(values[-math.ceil(len(values) / 10) :]) / math.ceil(len(values) / 10))
            assert metrics[f"spectra/condition/{name}"] == pytest.approx(condition, rel=2e-5)
    assert expected["spectra/estimate_error/o/max"] > 1e-3  # control: the error is not zero
    assert results[0][0]["signal/attention/absmax/1"] > 1.05 * expected["signal/attention/rms/1"]


def _log_under_context_parallelism(rank: int, config) -> None:
    """One step whose ranks have losses of 3 and 5 nats per token of their half of each sequence."""
    from pc.titan import trainer

    trainer.rules.require = lambda *_, **__: None  # attention needs a GPU
    off = ["--checkpoint.enable=false", "--validation.enable=false", "--pc.enable=false"]
    run = trainer.PCTrainer(load_config(config, [*off, "--parallelism.context_parallel_degree=2"]))
    run.optimizers.step = lambda: None
    run.forward_backward_step = lambda input_dict, labels, global_valid_tokens: (
        (3 + 2 * rank) * labels.numel() / 2 / global_valid_tokens
    )
    run.step = 1
    run.train_step(run.batch_generator(run.dataloader))
    run.close()


def test_tokens_and_losses_under_context_parallelism(tiny_config):
    """TorchTitan counts a sequence once for each rank that has a part of it."""
    config, folder = tiny_config
    run_ranks(2, _log_under_context_parallelism, config)
    line = json.loads((folder / "metrics.jsonl").read_text())
    assert line["loss"] == pytest.approx(4.0)
    assert line["max_loss"] == pytest.approx(5.0)
    assert line["tokens"] == 12 * 16
