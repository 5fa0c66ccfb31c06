"""On a fake GPU: every tensor of a step is on it, and nothing waits for it."""

import contextlib
import pkgutil
from unittest import mock

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
from pc import PCConfig
from pc.muon import Muon
from pc.passes import materialise, pull_back

RANKS = 8
_mesh: DeviceMesh | None = None


def _passes(strict):
    cases = [(level, "tf32", (8, 24)) for level in (1, 2, 3, 4, "polar_express")]
    cases += [(4, "float32", (24, 8)), (4, "bfloat16", (8, 8))]
    for level, compute_dtype, (n, m) in cases:
        weight, gradient = (torch.empty(3, n, m, device="cuda") for _ in range(2))
        gamma, u, v = (torch.empty(3, size, device="cuda") for size in (1, n, m))
        config = PCConfig(level=level, compute_dtype=compute_dtype, schedule="step")
        with strict:
            outputs = *materialise(config, weight, gamma, u, v), *pull_back(config, weight, gradient, gamma, u, v)
        assert {tensor.dtype for tensor in outputs} == {torch.float32}


def _gradients(model):
    for name, parameter in model.named_parameters():
        if not name.endswith("gamma"):  # pull_back sets those
            parameter.grad = torch.empty_like(parameter)


def _toy():
    with torch.device("cuda"):
        return nn.Sequential(ToyBlock(7, 10), ToyBlock(7, 10))


def _step(strict):
    """Schedule "step" and Muon around an optimizer step, on full matrices."""
    model = pc.attach(_toy(), PCConfig(compute_dtype="tf32", schedule="step"))
    schedule = pc.schedule(model)  # draws u and v on the CPU, once
    optimizer = Muon([weight.parameter for _, weight in pc.named_weights(model)], adjust_lr_fn="match_rms_adamw")
    _one_step(strict, model, schedule, optimizer)


def _one_step(strict, model, schedule, optimizer):
    _gradients(model)
    with strict:
        schedule.materialise()
        schedule.pull_back()
        schedule.restore_raw()
        optimizer.step()
        schedule.materialise()


def _exchange(strict):
    """The same with each matrix sharded over eight ranks, including uneven and empty shards."""
    model = pc.attach(_toy(), PCConfig(schedule="step"))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shard = distribute_tensor(parameter.detach(), _mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(shard))
    schedule = pc.schedule(model)
    optimizer = Muon([weight.parameter for _, weight in pc.named_weights(model)])
    _one_step(strict, model, schedule, optimizer)


def _model(strict, chunked=False):
    """Weight initialisation, forward pass and loss. A backward pass needs more of a device than this one has."""
    from torchtitan.components.loss import cross_entropy_loss

    from pc.titan.llama2 import Llama2, Llama2Args
    from pc.titan.loss import chunked_cross_entropy

    args = Llama2Args(dim=32, n_layers=2, n_heads=2, multiple_of=16, vocab_size=96, max_seq_len=64)
    args.chunked_loss = chunked
    with torch.device("cuda"):
        model = Llama2(args)
    tokens = torch.empty(2, 64, dtype=torch.long, device="cuda")
    with strict:
        model.init_weights(torch.device("cuda"))
        loss = (chunked_cross_entropy if chunked else cross_entropy_loss)(model(tokens), tokens)
        if chunked:  # computes the gradients with the loss; its backward pass only scales them
            d_states, d_weight, *_ = loss.grad_fn.apply(torch.empty_like(loss))
            assert (d_states.shape, d_weight.shape) == ((128, 32), (96, 32))


def _chunked_loss(strict):
    _model(strict, chunked=True)


# Case: (function, where a fault is planted).
CASES = {
    "passes": (_passes, "pc.polynomial.gram_matrix"),
    "step": (_step, "pc.owner.Plan.run"),
    "Muon": (_step, "pc.muon._zeropower_via_newtonschulz"),
    "exchange": (_exchange, "torch.distributed.all_to_all_single"),
    "weights": (_model, "pc.titan.draws.random_bits_"),
    "forward": (_model, "torchtitan.models.llama3.model.model.apply_rotary_emb"),
    "loss": (_chunked_loss, "pc.titan.loss.ChunkedCrossEntropy.apply"),
}
# Fault: (the fault, its message).
FAULTS = {
    "on the CPU": (lambda: torch.ones(3), "a tensor (3,) on cpu"),
    "hidden wait": (lambda: torch.ones(3, device="cuda").sum().item(), "waits for the device"),
}


def _trace(rank) -> tuple[dict, dict]:
    """Messages of each function without fault, and with each fault in each place."""
    global _mesh
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=RANKS)
    _mesh = DeviceMesh("cuda", list(range(RANKS)))
    plain, faulty = {}, {}
    with pretended_cuda.pretended_cuda() as strict:
        for function in dict.fromkeys(function for function, _ in CASES.values()):
            plain[function.__name__] = _message(function, strict)
        for case, (function, place) in CASES.items():
            for fault, (plant, _) in FAULTS.items():
                faulty[case, fault] = _message(function, strict, place, plant)
    return plain, faulty


def _message(function, strict, place=None, plant=None) -> str:
    with contextlib.ExitStack() as undo:
        if place is not None:
            original = pkgutil.resolve_name(place)
            planted = lambda *args, **kwargs: (plant(), original(*args, **kwargs))[1]  # noqa: E731
            undo.enter_context(mock.patch(place, planted))
        try:
            function(strict)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.skipif(not pretended_cuda.COMPILER, reason="needs g++")
def test_all_is_on_the_gpu_and_nothing_waits_for_it():
    plain, faulty = run_ranks(1, _trace)[0]
    assert plain == dict.fromkeys(plain, "")
    for (case, fault), message in faulty.items():
        assert FAULTS[fault][1] in message, (case, fault, message)
