"""The estimate by hand where it can be made by hand, and in proportion where it cannot."""

from dataclasses import replace
from pathlib import Path

import pytest

from pc import PCConfig
from pc.plan import gpu_time
from pc.plan.cost import Matrix, Plan
from pc.plan.traffic import of_passes

CONFIG = Path(__file__).parents[3] / "train_configs" / "271m_adamw_pc.toml"
H100 = gpu_time.DEVICES["H100"]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_traced_operations_are_the_counted_ones(precision):
    config = PCConfig(compute_dtype=precision, schedule="step")
    traffic = of_passes([(128, 64, config)] * 3)
    matrix = Matrix(128, 64, config)
    for name, counted in (("materialise", matrix.materialise_flops()), ("pull back", matrix.pull_back_flops())):
        kernels = traffic[name].kernels
        assert sum(kernel.flops for kernel in kernels) == pytest.approx(3 * counted, rel=0.05)
        # the polynomial's products have the precision asked for; the power iteration's, with vectors, float32
        large = [kernel for kernel in kernels if kernel.flops >= 3 * 2 * 64**3]
        assert large and {kernel.precision for kernel in large} == {precision}
    iteration = [k for k in traffic["materialise"].kernels if 0 < k.flops < 3 * 2 * 64**3]
    assert iteration and {kernel.precision for kernel in iteration} == {"float32"}


def test_bounds_of_a_kernel():
    traffic = of_passes([(4096, 4096, PCConfig(compute_dtype="tf32", schedule="step"))])["pull back"]
    # large products alone: bound by operations
    fast_memory = replace(H100, memory=1e30)
    no_launches = replace(gpu_time.REACHED, launch=0.0)
    by_operations = sum(k.flops / (H100.flops[k.precision] * gpu_time.PRODUCTS[k.precision]) for k in traffic.kernels)
    assert gpu_time._seconds(traffic, fast_memory, no_launches) == pytest.approx(by_operations)
    assert gpu_time._seconds(traffic, H100, no_launches) > by_operations
    # and by the host where it is slow
    slow = replace(gpu_time.REACHED, launch=1.0)
    assert gpu_time._seconds(traffic, H100, slow) == len(traffic.kernels)


def test_more_gpus_and_cheaper_products():
    plans = [Plan(CONFIG, [], ranks) for ranks in (1, 8)]
    alone, eight = (gpu_time.estimate(plan, H100, "tf32") for plan in plans)
    assert alone.exchange == 0 < eight.exchange
    assert alone.model == pytest.approx(8 * eight.model)
    assert 0.1 * alone.pull_back < eight.pull_back < 0.3 * alone.pull_back  # one of eight owners, smaller batches
    by_precision = [gpu_time.estimate(plans[0], H100, precision).pc for precision in gpu_time.PRECISIONS]
    assert by_precision == sorted(by_precision, reverse=True)
    # Of 15 others 8 are beyond the node.
    assert gpu_time._link(8, H100) == 450e9
    assert gpu_time._link(16, H100) == pytest.approx(50e9 * 15 / 8)
    text = gpu_time.table(plans[1])
    assert all(f"| {name} |" in text for name in gpu_time.DEVICES) and "not measured" in text


def test_fsdp_exchanges_once_per_step_where_the_run_does():
    words = ["--training.local_batch_size", "1", "--training.global_batch_size", "64", "--parallelism.fsdp_sync"]
    plans = {sync: Plan(CONFIG, [*words, sync], 16) for sync in ("micro_batch", "step", "auto", "replicas_per_step")}
    seconds = {sync: gpu_time._fsdp_seconds(plan, H100, gpu_time.REACHED) for sync, plan in plans.items()}
    parameters = sum(p.numel() for p in plans["step"].model.parameters())
    rate = 0.7 * 50e9 * 15 / 8
    assert plans["step"].micro_batches == 4
    assert seconds["step"] == pytest.approx(6 * parameters * 15 / 16 / rate)
    assert seconds["micro_batch"] == pytest.approx(4 * 8 * parameters * 15 / 16 / rate)
    assert seconds["replicas_per_step"] == seconds["micro_batch"] and seconds["auto"] == seconds["step"]
    # "auto" on a device that has no room for it
    assert not gpu_time.exchanges_once(plans["auto"], replace(H100, gib=5))
    assert gpu_time.exchanges_once(plans["step"], replace(H100, gib=5))
