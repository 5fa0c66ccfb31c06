"""On a fake GPU: every tensor of a step is on it, and the host never waits for it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import pc
from helpers import pretended_cuda
from helpers.ranks import run_ranks
from helpers.toy import ToyBlock
from pc import PCConfig, maps
from pc.method import method_of
from pc.optim.muon import Muon

RANKS = 8
_mesh: DeviceMesh | None = None


def _passes(strict):
    cases = [(level, compute_dtype, (8, 24)) for level in maps.LEVELS for compute_dtype in ("tf32", "float16")]
    cases += [(4, compute_dtype, shape) for compute_dtype in ("float32", "float16") for shape in ((24, 8), (8, 8))]
    for level, compute_dtype, (n, m) in cases:
        weight, gradient = (torch.empty(3, n, m, device="cuda") for _ in range(2))
        gamma, u, v = (torch.empty(3, size, device="cuda") for size in (1, n, m))
        config = PCConfig(level=level, compute_dtype=compute_dtype)
        with strict:
            method = method_of(config)
            written = method.evaluate(weight, gamma, u, v)
            pulled_back = method.pull_back(weight, gradient, gamma, u, v)
            pulled_back += method.pull_back(weight, gradient, gamma, u, v, written[-1])
        assert {tensor.dtype for tensor in (*written[:3], *pulled_back)} == {torch.float32}


def _step(strict, sharded=False, compute_dtype="tf32"):
    """Both passes around a step of Muon."""
    with torch.device("cuda"):
        model = pc.attach(nn.Sequential(ToyBlock(7, 10), ToyBlock(7, 10)), PCConfig(compute_dtype=compute_dtype))
    for module in model.modules() if sharded else ():
        for name, parameter in module.named_parameters(recurse=False):
            shard = distribute_tensor(parameter.detach(), _mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(shard))
    preconditioner = pc.precondition(model)  # draws u and v on the CPU, once
    optimizer = Muon([weight.orig for weight in preconditioner.weights.values()], adjust_lr_fn="match_rms_adamw")
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):  # pull_back sets the others
            parameter.grad = torch.empty_like(parameter)
    with strict:
        preconditioner.pull_back()
        optimizer.step()
        preconditioner.write_pc()


def _exchange(strict):
    """A step with each matrix sharded over eight ranks, with uneven and empty shards."""
    _step(strict, sharded=True)


def _half_step(strict):
    _step(strict, compute_dtype="float16")


def _trace(rank) -> dict[str, str]:
    """The error of each function, and of two planted faults."""
    global _mesh
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=RANKS)
    _mesh = DeviceMesh("cuda", list(range(RANKS)))
    found = {}
    with pretended_cuda.pretended_cuda() as strict:
        for function in (_passes, _step, _half_step, _exchange, _on_the_cpu, _waits):
            found[function.__name__] = ""
            try:
                function(strict)
            except Exception as error:
                found[function.__name__] = f"{type(error).__name__}: {error}"
    return found


def _on_the_cpu(strict):
    with strict:
        torch.ones(3)


def _waits(strict):
    with strict:
        torch.ones(3, device="cuda").sum().item()


@pytest.mark.skipif(not pretended_cuda.COMPILER, reason="needs g++")
def test_all_is_on_the_gpu_and_nothing_waits_for_it():
    found = run_ranks(1, _trace)[0]
    assert "a tensor (3,) on cpu" in found.pop("_on_the_cpu") and "waits for the device" in found.pop("_waits")
    assert found == dict.fromkeys(found, "")
