"""Muon on shards against unsharded `torch.optim.Muon`: bit for bit."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pc.muon import Muon
from ranks import run_ranks

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


def _sharded(rank, world_size, options):
    mesh = init_device_mesh("cpu", (world_size,))
    model = fully_shard(_model(), mesh=mesh)
    optimizer = Muon(model.parameters(), **OPTIONS | options)
    for step in range(20):
        for index, parameter in enumerate(model):
            parameter.grad = torch.distributed.tensor.distribute_tensor(
                _gradient(step, index), mesh, parameter.placements, src_data_rank=None
            )
        optimizer.step()
    return [p.full_tensor().detach().clone() for p in model]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "original"}], ids=["default", "original"])
def test_bitwise_equal_to_unsharded_torch(world_size, options):
    expected = _reference(**options)
    for parameters in run_ranks(world_size, _sharded, world_size, options):
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
