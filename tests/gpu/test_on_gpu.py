"""GPU results against float64 or the same run on a CPU. `./run_tests.sh --gpu`; skipped without a GPU.

PC_GPU_TESTS_ON=cpu runs the same on a CPU, which shows that the tests themselves work.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from helpers import tiny
from helpers.tiny import ROOT
from pc import PCConfig, owner
from pc.method import method_of, power_iteration

DEVICE = os.environ.get("PC_GPU_TESTS_ON") or ("cuda" if torch.cuda.is_available() else None)
pytestmark = pytest.mark.skipif(DEVICE is None, reason="needs a GPU")

# Relative errors of both passes at level 4 (docs/performance.md), with room for a factor of 4.
TOLERANCES = {"float32": 2e-6, "tf32": 2.4e-3, "float16": 3.2e-3}


def _passes(precision, device, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(3, 256, 700, generator=generator, dtype=torch.float64) for _ in range(2))
    u, v = (torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (256, 700))
    u, v = power_iteration(weight, u / u.norm(dim=1, keepdim=True), v / v.norm(dim=1, keepdim=True), 200)
    config = PCConfig(compute_dtype=precision)
    weight, gradient, u, v = (tensor.to(device, dtype) for tensor in (weight, gradient, u, v))
    gamma = torch.full((3, 1), 0.9, device=device, dtype=dtype)
    effective, *_ = method_of(config).evaluate(weight, gamma, u, v)
    pulled = method_of(config).pull_back(weight, gradient, gamma, u, v)
    return [tensor.double().cpu() for tensor in (effective, *pulled)]


def test_passes_in_each_precision():
    exact = _passes("float32", "cpu", torch.float64)
    errors = {
        precision: max(
            ((found - expected).norm() / expected.norm()).item()
            for found, expected in zip(_passes(precision, DEVICE, torch.float32), exact, strict=True)
        )
        for precision in TOLERANCES
    }
    assert all(errors[precision] < TOLERANCES[precision] for precision in errors), errors
    if DEVICE == "cuda":  # control: less precise matmuls exceed the tolerance of the more precise ones
        assert errors["tf32"] > TOLERANCES["float32"], "TF32 is not in use"


def test_float32_where_the_process_has_tf32_on():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with_tf32_on = _passes("float32", DEVICE, torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)
    for one, other in zip(with_tf32_on, _passes("float32", DEVICE, torch.float32), strict=True):
        assert torch.equal(one, other)


def test_batches_are_their_matrices(monkeypatch):
    config = PCConfig()
    generator = torch.Generator().manual_seed(3)
    items = [
        tuple(torch.randn(shape, generator=generator).to(DEVICE) for shape in ((96, 160), (1,), (96,), (160,)))
        for _ in range(4)
    ]
    outputs = [[tuple(torch.empty_like(x) for x in (w, u, v)) for w, _, u, v in items] for _ in range(2)]
    for output, one_by_one in zip(outputs, ((DEVICE,), ()), strict=True):
        monkeypatch.setattr(owner, "ONE_BY_ONE", one_by_one)
        plan = owner.Plan(items, output, [config] * 4)
        plan.run(lambda key, *item: method_of(key).evaluate(*item)[:3], items, output)
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_exchange():
    ranks = torch.cuda.device_count() if DEVICE == "cuda" else 2
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    _run([*words, str(ROOT / "tests" / "gpu" / "exchange.py"), DEVICE])


def _run(words, device=DEVICE):
    places = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "NGPU": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def losses(tiny_shards, tmp_path_factory):
    """Losses of six steps: the CPU's, and those of runs that continue from the CPU's third step on the device.

    Each device draws its own initial weights, so only a checkpoint makes weights equal.
    """
    folder = tmp_path_factory.mktemp("runs")

    def train(kind, device, steps, *overrides):
        config = tiny.write_config(folder / f"{kind}.toml", tiny_shards, folder / kind)
        config.write_text(config.read_text().replace('flavor = "tiny"', 'flavor = "nano"'))  # other processes know it
        shape = ["--training.seq_len", "64", "--lr_scheduler.total_steps", "6", "--training.steps", str(steps)]
        _run(["-m", "pc_recipe.runs.local", str(config), *shape, *overrides], device)

    train("cpu", "cpu", 3)
    for kind in ("device", "compiled", "other rate"):
        shutil.copytree(folder / "cpu", folder / kind)
    train("cpu", "cpu", 6)
    train("device", DEVICE, 5)
    train("device", DEVICE, 6)
    train("compiled", DEVICE, 6, "--compile.enable", "true")
    train("other rate", DEVICE, 6, "--optimizer.lr", "2e-2")
    return {kind: tiny.metrics(folder / kind) for kind in ("cpu", "device", "compiled", "other rate")}


def test_training_goes_on_as_on_the_cpu(losses):
    # float32 sums in another order, over three steps; the device's checkpoint of step 5 is in between
    assert losses["device"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["compiled"] == pytest.approx(losses["device"], rel=1e-3)
    assert losses["other rate"][-1] != pytest.approx(losses["cpu"][-1], rel=1e-3)  # control
