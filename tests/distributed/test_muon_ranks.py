"""Muon on shards against unsharded `torch.optim.Muon`: bit for bit."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.ranks import run_ranks
from pc import Cut, PCConfig
from pc.cuts import form_of
from pc.muon import Muon

SHAPES = [(7, 5), (7, 5), (5, 7), (1, 4), (6, 6), (3, 8), (2, 9)]  # of three ranks (1, 4) and (2, 9) leave some empty
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
        if step == 10:  # a copy trains on as the original would
            model, optimizer = copy.deepcopy((model, optimizer))
        for index, parameter in enumerate(model):
            parameter.grad = _gradient(step, index)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model, _reference(), strict=True))


CUTS = [((20, 7), Cut(("q", "k", "v"), sizes=(3, 1, 1), head_dim=4)), ((5, 12, 6), Cut(("gate", "up"), sizes=(2, 1)))]
CUTS += [((5, 6, 12), Cut(transposed=True)), ((18, 5), Cut(("q", "k", "v"), repeats=3))]


def _separate(shape, cut, tensor):
    """The matrices of a weight."""
    form = form_of("", shape, cut, [PCConfig()] * len(cut.blocks), [cut.head_dim] * len(cut.blocks))
    return form, [matrix for part in form.cut("w", tensor if form.stack else tensor[None]) for matrix in part]


def _cut_gradient(step, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def _cut_weights(rank, world_size):
    """Weights after ten steps, whole."""
    results = []
    for shape, cut in CUTS:
        model = nn.ParameterList([nn.Parameter(_cut_gradient(99, shape))])
        if world_size > 1:
            mesh = init_device_mesh("cpu", (world_size,))
            model = fully_shard(model, mesh=mesh)
        optimizer = Muon([{"params": list(model.parameters()), "cut": cut}], **OPTIONS)
        for step in range(10):
            (parameter,) = model.parameters()
            gradient = _cut_gradient(step, shape)
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if world_size > 1 else gradient
            optimizer.step()
        results.append((parameter.full_tensor() if world_size > 1 else parameter).detach().clone())
    return results


def test_cut_weights_are_their_matrices():
    """Bit for bit, except where parts of several shapes share a weight: their factors are rounded to bfloat16."""
    found = _cut_weights(0, 1)
    for (shape, cut), result in zip(CUTS, found, strict=True):
        _, matrices = _separate(shape, cut, _cut_gradient(99, shape))
        parameters = [nn.Parameter(matrix.clone()) for matrix in matrices]
        optimizer = torch.optim.Muon(parameters, **OPTIONS)
        for step in range(10):
            for parameter, gradient in zip(
                parameters, _separate(shape, cut, _cut_gradient(step, shape))[1], strict=True
            ):
                parameter.grad = gradient.clone()
            optimizer.step()
        tolerance = 2e-3 if cut.sizes and not cut.head_dim else 0  # ten steps of 0.2 x 0.02, rounded by 2^-9 each
        for parameter, matrix in zip(parameters, _separate(shape, cut, result)[1], strict=True):
            torch.testing.assert_close(parameter.detach(), matrix, rtol=0, atol=tolerance)
    for ranks in run_ranks(3, _cut_weights, 3):
        assert all(torch.equal(a, b) for a, b in zip(ranks, found, strict=True))
    with pytest.raises(ValueError, match="a cut in the parameter group"):
        Muon([nn.Parameter(torch.zeros(2, 3, 4))])
