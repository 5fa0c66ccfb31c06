"""Muon on shards and on weights of several matrices against `torch.optim.Muon` on each matrix alone: bit for bit."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.ranks import run_ranks
from pc import MatrixSplit, PCConfig
from pc.optim.muon import Muon
from pc.splits import split_of

# On three ranks, (1, 4) and (2, 9) leave some ranks empty.
MATRICES = [(7, 5), (7, 5), (5, 7), (1, 4), (6, 6), (3, 8), (2, 9)]
SPLITS = [
    ((20, 7), MatrixSplit(("q", "k", "v"), sizes=(3, 1, 1), head_dim=4)),
    ((5, 12, 6), MatrixSplit(("gate", "up"), sizes=(2, 1))),
    ((5, 6, 12), MatrixSplit(transposed=True)),
    ((18, 5), MatrixSplit(("q", "k", "v"), repeats=3)),
]
WEIGHTS = [*((shape, None) for shape in MATRICES), *SPLITS]
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
ORIGINAL = {"nesterov": False, "adjust_lr_fn": "original"}
STEPS = 10


def _draw(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape, _ in WEIGHTS]


def _separate(tensors):
    """The separate matrices of every weight."""
    separate = []
    for tensor, (shape, given) in zip(tensors, WEIGHTS, strict=True):
        if given is None:
            separate.append([tensor])
        else:
            split = split_of("", shape, given, [PCConfig()] * len(given.blocks), [given.head_dim] * len(given.blocks))
            parts = split.split_weight(tensor if split.stack else tensor[None])
            separate.append([matrix for part in parts for matrix in part])
    return separate


def _reference(**options):
    """Every matrix after training with torch's Muon."""
    weights = [[nn.Parameter(matrix.clone()) for matrix in matrices] for matrices in _separate(_draw(99))]
    parameters = sum(weights, [])
    optimizer = torch.optim.Muon(parameters, **OPTIONS | options)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, sum(_separate(_draw(step)), []), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return weights


def _train(rank, shape, options):
    """Every weight after training on a mesh of this shape, whole; () is one process."""
    mesh = init_device_mesh("cpu", shape) if shape else None

    def shard(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0), Shard(1)][: len(shape)], src_data_rank=None)

    weights = [nn.Parameter(shard(weight) if shape else weight) for weight in _draw(99)]
    splits = zip(weights[len(MATRICES) :], SPLITS, strict=True)
    groups = [{"params": [weight], "split": split} for weight, (_, split) in splits]
    optimizer = Muon([{"params": weights[: len(MATRICES)]}, *groups], **OPTIONS | options)
    for step in range(STEPS):
        if step == 5 and not shape:  # a copy continues as the original would
            weights, optimizer = copy.deepcopy((weights, optimizer))
        for weight, gradient in zip(weights, _draw(step), strict=True):
            weight.grad = shard(gradient) if shape else gradient
        optimizer.step()
    return [(weight.full_tensor() if shape else weight).detach().clone() for weight in weights]


def _require_equal(weights, expected):
    """Bit for bit, except where parts of several shapes share a weight: their factors are rounded to bfloat16."""
    for found, matrices, (_, split) in zip(_separate(weights), expected, WEIGHTS, strict=True):
        tolerance = 2e-3 if split and split.sizes and not split.head_dim else 0  # ten steps of 0.2 x 0.02 by 2^-9 each
        for matrix, other in zip(found, matrices, strict=True):
            torch.testing.assert_close(matrix, other.detach(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape, options", [((2,), ORIGINAL), ((3,), {}), ((2, 2), {})], ids=["2", "3", "2x2"])
def test_bitwise_equal_to_unsharded_torch(shape, options):
    expected = _reference(**options)
    for weights in run_ranks(math.prod(shape), _train, shape, options):
        _require_equal(weights, expected)


@pytest.mark.fast
def test_alone_it_is_torch_muon_too():
    _require_equal(found := _train(0, (), {}), _reference())
    with pytest.raises(AssertionError):  # control
        _require_equal(found, _reference(lr=0.021))
    for wrong in ({"lr": -1.0}, {"adjust_lr_fn": "match_rms"}):
        with pytest.raises(ValueError):
            Muon([nn.Parameter(torch.ones(2, 2))], **wrong)
    with pytest.raises(ValueError, match='a "split" in its parameter group'):
        Muon([nn.Parameter(torch.zeros(2, 3, 4))])
