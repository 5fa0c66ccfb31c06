"""What owners keep of PC(W) for its gradient: fewer FLOPs, the same bits, a bounded size, and nothing stale."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import pc
from helpers.ranks import run_ranks
from helpers.toy import Loop, same, toy_batch, toy_loss, toy_model
from pc import owner, step

D, F, LAYERS = 7, 10, 2  # of the toy model
# For each matrix, at level 4: the Gram matrix, p of it, and the quadratic inside p.
KEPT_BYTES = 4 * LAYERS * 3 * D * D * 8
# The first of these takes a product of [s, l] and [l, s], the others one of [s, s] and [s, s].
SAVED = 2 * LAYERS * D * D * (D + 3 * F + 4 * 2 * D)


def _train(limit, monkeypatch):
    """Three steps, of which the second lacks the gradient of one weight: the final state, and FLOPs of each pull-back."""
    monkeypatch.setattr(step, "KEPT_BYTES", limit)
    loop, flops = Loop(), []
    for index in range(3):
        loop.backward(index)
        if index == 1:
            loop.model[0].attention["wo"].weight.grad = None
        with FlopCounterMode(display=False) as counter:
            loop.preconditioner.pull_back()
        flops.append(counter.get_total_flops())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return [part.state_dict() for part in loop.parts], flops


@pytest.mark.parametrize("one_by_one", [("cpu",), ()], ids=["alone", "in batches"])
def test_products_kept_for_the_gradient(monkeypatch, one_by_one):
    monkeypatch.setattr(owner, "ONE_BY_ONE", one_by_one)
    nothing, everything, half = (_train(limit, monkeypatch) for limit in (0, KEPT_BYTES, KEPT_BYTES // 2))
    assert nothing[1][0] - everything[1][0] == nothing[1][2] - everything[1][2] == SAVED
    assert nothing[1][0] > half[1][0] > everything[1][0]
    if one_by_one:  # other batches round differently
        assert same(everything[0], nothing[0]) and same(half[0], nothing[0])
    assert not same(everything[0], Loop().call("backward", "pull_back", "step").parts[0].state_dict())  # control


def _flops_after_a_step(rank, wrap):
    """FLOPs of the second pull-back on this rank."""
    model = pc.attach(toy_model(), pc.PCConfig())
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = pc.precondition(wrapped, optimizer)
    for _ in range(2):
        toy_loss(wrapped, toy_batch(rank)).backward()
        with FlopCounterMode(display=False) as counter:
            preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()
    return counter.get_total_flops()


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_each_owner_keeps_what_it_pulls_back(wrap):
    alone = _flops_after_a_step(0, lambda model: model)
    assert run_ranks(2, _flops_after_a_step, wrap) == [alone / 2] * 2  # each owns one of two equal layers
