"""PC on sharded stacks, fused weights and heads against the same on one rank, in float64."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import pc
from helpers.ranks import run_ranks
from pc import MatrixSplit, PCConfig, owner

# Parameter: (shape, split). Boundaries of two or three shards are not those of parts, heads or experts.
WEIGHTS = {
    "qkv": ((20, 7), MatrixSplit(("q", "k", "v"), sizes=(3, 1, 1), head_dim=4)),
    "interleaved": ((18, 5), MatrixSplit(("q", "k", "v"), repeats=3)),
    "transposed": ((7, 10), MatrixSplit(("up",), transposed=True)),
    "gate_up": ((5, 12, 6), MatrixSplit(("gate", "up"), sizes=(2, 1))),
    "down": ((5, 6, 12), MatrixSplit(("down",), transposed=True)),
    "single": ((7, 5), MatrixSplit(("o",))),
}
CONFIG = PCConfig(
    level={"q": 2, "v": 4, "o": 4, "ffn": 1},
    blocks=("q", "v", "o", "ffn"),  # k has no PC
    splits={f"*.{name}": split for name, (_, split) in WEIGHTS.items()},
)


def draw(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain():
    """Two parts of a model."""
    parameters = {name: nn.Parameter(draw(i, shape)) for i, (name, (shape, _)) in enumerate(WEIGHTS.items())}
    names = list(parameters)
    return nn.ModuleDict({str(i): nn.ParameterDict({n: parameters[n] for n in names[i::2]}) for i in (0, 1)})


def train(part, change):
    """All parameters after two steps on drawn gradients from a preserving start, and the gradients of each pull-back."""
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    preconditioner = pc.precondition([*part.values()] if isinstance(part, nn.ModuleDict) else [part])
    pc.preserve(part)
    preconditioner.follow(optimizer)
    results = {}
    for step in range(2):
        for name, weight in preconditioner.weights.items():
            index = list(WEIGHTS).index(name.partition(".")[2])
            weight.effective.grad = change(draw(100 * step + index, weight.effective.shape), weight.effective)
        preconditioner.pull_back()
        for name, weight in preconditioner.weights.items():
            results |= {f"{name} gradient {step}": weight.orig.grad, f"{name} gamma {step}": weight.gamma.grad}
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in preconditioner.weights.items():
        results |= {f"{name} {key}": getattr(weight, key).detach() for key in ("effective", "orig", "gamma", "u", "v")}
    return results


def like(tensor, sharded):
    """A full tensor, sharded like another."""
    if not isinstance(sharded, DTensor):
        return tensor
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, min(start, tensor.size(dim)), length)
    mesh, placements = sharded.device_mesh, sharded.placements
    full = {"shape": sharded.shape, "stride": sharded.stride()}
    return DTensor.from_local(tensor.contiguous(), mesh, placements, run_check=False, **full)


# By name: mesh, the dimension of the stacks that tensor parallelism shards (None: no tensor parallelism), and FSDP's.
LAYOUTS = {
    "FSDP2, experts": ({"fsdp": 2}, None, 0),
    "FSDP3, experts": ({"fsdp": 3}, None, 0),
    "FSDP3, rows": ({"fsdp": 3}, None, 1),
    "HSDP2x2": ({"replicate": 2, "fsdp": 2}, None, 0),
    "TP2 of rows x FSDP2, experts": ({"fsdp": 2, "tp": 2}, 1, 0),
    "EP2 x FSDP2, experts": ({"fsdp": 2, "tp": 2}, 0, 0),
    "EP2 x FSDP2, rows": ({"fsdp": 2, "tp": 2}, 0, 1),
    "PP2": ({"pp": 2}, None, 0),
    "PP2 x FSDP2, rows": ({"pp": 2, "fsdp": 2}, None, 1),
}


def _on_ranks(rank, degrees, tensor_parallel, fsdp_dim):
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    expected = train(pc.attach(plain(), CONFIG), like)
    model = pc.attach(plain(), CONFIG)
    part = model[str(mesh.get_local_rank("pp"))] if "pp" in degrees else model
    if tensor_parallel is not None:
        for owner_of, key, parameter in [(m, k, p) for m in model.values() for k, p in m.named_parameters()]:
            placement = Shard(tensor_parallel if parameter.ndim == 3 else 0)
            if key.endswith("gamma"):
                placement = Shard(0) if tensor_parallel == 0 and parameter.ndim == 2 else Replicate()
            shard = distribute_tensor(parameter.detach(), mesh["tp"], [placement], src_data_rank=None)
            setattr(owner_of, key, nn.Parameter(shard))
    names = tuple(name for name in degrees if name not in ("tp", "pp"))
    for module in ([part] if "pp" in degrees else model.values()) if names else []:
        fully_shard(module, mesh=mesh[names], shard_placement_fn=lambda p: Shard(fsdp_dim if p.ndim == 3 else 0))
    if "replicate" in degrees:
        owner.ONE_BY_ONE = ()  # in batches, as on a GPU
    found = train(part, like)
    differences = {}
    for name, result in found.items():
        assert result.shape == expected[name].shape, name
        local, mine = (x._local_tensor if isinstance(x, DTensor) else x for x in (result, like(expected[name], result)))
        assert mine.shape == local.shape, name
        differences[name] = ((local - mine).abs().max() / expected[name].abs().max()).item() if mine.numel() else 0.0
    return len(differences), max(differences.items(), key=lambda item: item[1])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sharded_splits_equal_whole_ones(layout):
    degrees, *_ = layout
    for count, (name, difference) in run_ranks(math.prod(degrees.values()), _on_ranks, *layout):
        assert difference < 1e-12, name
        assert count == 9 * len(WEIGHTS) // degrees.get("pp", 1)


def test_splits_in_batches_equal_those_one_by_one(monkeypatch):
    """As on a GPU, where batches are of matrices that lie apart, and a weight may have several singular vectors."""
    expected = train(pc.attach(plain(), CONFIG), like)
    monkeypatch.setattr(owner, "ONE_BY_ONE", ())
    for name, found in train(pc.attach(plain(), CONFIG), like).items():
        assert (found - expected[name]).abs().max() < 1e-12 * expected[name].abs().max(), name


def test_split_weights_are_preserved_and_merged():
    """PC(W) is the given weight, rows without PC are untouched, and the merged model is the plain one."""
    model = pc.attach(plain(), CONFIG)
    pc.preserve(model)
    preconditioner = pc.precondition(model)
    for name, weight in preconditioner.weights.items():
        given = plain().get_parameter(name)
        torch.testing.assert_close(weight.effective, given, rtol=0, atol=1e-5)  # an epsilon of 1e-7 beside norms near 1
        assert (weight.orig - given).abs().max() > 1e-2, name  # control: W is another weight
    k = model["0"]["qkv"][12:16]
    assert torch.equal(k, plain()["0"]["qkv"][12:16])
    effective = {name: weight.effective for name, weight in preconditioner.weights.items()}
    merged = pc.merge(model).state_dict()
    assert [*merged] == [*plain().state_dict()] and all(torch.equal(merged[name], effective[name]) for name in merged)
