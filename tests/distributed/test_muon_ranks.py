"""Muon on shards against unsharded `torch.optim.Muon`: bit for bit."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.ranks import run_ranks
from pc.muon import Muon

SHAPES = [
    (7, 5),
    (7, 5),
    (5, 7),
    (1, 4),
    (6, 6),
    (3, 8),
    (2, 9),
]  # with three ranks (1, 4) and (2, 9) leave ranks empty
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}


def _model():
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES)
    return model


def _gradient(step, index):
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(100 * step + index))


def _reference(**options):
    model = _model()
    optimizer = torch.optim.Muon(model.parameters(), **OPTIONS | options)
    for step in range(20):
        for index, parameter in enumerate(model):
            parameter.grad = _gradient(step, index)
        optimizer.step()
    return [p.detach().clone() for p in model]


def _sharded(rank, shape, options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp")[: len(shape)])
    if len(shape) == 1:
        model = fully_shard(_model(), mesh=mesh)
    else:
        placements = [Shard(0), Shard(1)]
        model = [nn.Parameter(distribute_tensor(p.detach(), mesh, placements, src_data_rank=None)) for p in _model()]
    optimizer = Muon(list(model), **OPTIONS | options)
    for step in range(20):
        for index, parameter in enumerate(model):
            parameter.grad = distribute_tensor(_gradient(step, index), mesh, parameter.placements, src_data_rank=None)
        optimizer.step()
    return [p.full_tensor().detach().clone() for p in model]


ORIGINAL = {"nesterov": False, "adjust_lr_fn": "original"}


@pytest.mark.parametrize("shape, options", [((2,), ORIGINAL), ((3,), {}), ((2, 2), {})], ids=["2", "3", "2x2"])
def test_bitwise_equal_to_unsharded_torch(shape, options):
    expected = _reference(**options)
    for parameters in run_ranks(math.prod(shape), _sharded, shape, options):
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    other = _reference(lr=0.021)  # control
    assert not any(torch.equal(a, b) for a, b in zip(other, expected, strict=True))


def test_alone_it_is_torch_muon_too():
    model = _model()
    optimizer = Muon(model.parameters(), **OPTIONS)
    for step in range(20):
        for index, parameter in enumerate(model):
            parameter.grad = _gradient(step, index)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model, _reference(), strict=True))
