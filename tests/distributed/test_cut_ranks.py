"""Schedule "step" on sharded stacks, fused weights and heads against the same on one rank, in float64."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import pc
from helpers.ranks import run_ranks
from pc import Cut, PCConfig

# Parameter: (shape, cut). No boundary of two or three shards is one of parts, heads or experts.
WEIGHTS = {
    "qkv": ((20, 7), Cut(("q", "k", "v"), sizes=(3, 1, 1), head_dim=4)),
    "interleaved": ((18, 5), Cut(("q", "k", "v"), repeats=3)),
    "transposed": ((7, 10), Cut(("up",), transposed=True)),
    "gate_up": ((5, 12, 6), Cut(("gate", "up"), sizes=(2, 1))),
    "down": ((5, 6, 12), Cut(("down",), transposed=True)),
    "single": ((7, 5), Cut(("o",))),
}
CONFIG = PCConfig(
    level={"q": 2, "v": 4, "o": 4, "ffn": 1},
    blocks=("q", "v", "o", "ffn"),  # k stays as it is
    cuts={name: cut for name, (_, cut) in WEIGHTS.items()},
)


def draw(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model():
    parameters = {name: nn.Parameter(draw(i, shape)) for i, (name, (shape, _)) in enumerate(WEIGHTS.items())}
    return pc.attach(nn.ParameterDict(parameters), CONFIG)


def train(module, change):
    """All parameters after two steps on drawn gradients, and after each pull-back the gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = pc.schedule(module, optimizer)
    results = {}
    for step in range(2):
        for i, name in enumerate(WEIGHTS):
            parameter = schedule.weights[name].weight
            parameter.grad = change(draw(100 * step + i, WEIGHTS[name][0]), parameter)
        schedule.pull_back()
        for name, state in schedule.weights.items():
            results |= {f"{name} gradient {step}": state.weight.grad, f"{name} gamma {step}": state.gamma.grad}
        optimizer.step()
        optimizer.zero_grad()
    for name, state in schedule.weights.items():
        results |= {f"{name} {key}": getattr(state, key).detach() for key in ("weight", "raw", "gamma", "u", "v")}
    return results


def like(tensor, sharded):
    """A full tensor, sharded like another."""
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, min(start, tensor.size(dim)), length)
    mesh, placements = sharded.device_mesh, sharded.placements
    full = {"shape": sharded.shape, "stride": sharded.stride()}
    return DTensor.from_local(tensor.contiguous(), mesh, placements, run_check=False, **full)


# By name: mesh, the tensor-parallel dimension of the stacks (None: no tensor parallelism), FSDP's dimension of them.
LAYOUTS = {
    "FSDP2, experts": ({"fsdp": 2}, None, 0),
    "FSDP3, experts": ({"fsdp": 3}, None, 0),
    "FSDP3, rows": ({"fsdp": 3}, None, 1),
    "HSDP2x2": ({"replicate": 2, "fsdp": 2}, None, 0),
    "TP2 of rows x FSDP2, experts": ({"fsdp": 2, "tp": 2}, 1, 0),
    "EP2 x FSDP2, experts": ({"fsdp": 2, "tp": 2}, 0, 0),
    "EP2 x FSDP2, rows": ({"fsdp": 2, "tp": 2}, 0, 1),
}


def _on_ranks(rank, degrees, tensor_parallel, fsdp_dim):
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    sent, exchange = [], dist.all_to_all_single

    def counted(receive, send, *sizes, group):
        sent.append(send.numel())
        return exchange(receive, send, *sizes, group=group)

    expected = train(model(), lambda tensor, _: tensor)
    module = model()
    if tensor_parallel is not None:
        for key, parameter in list(module.named_parameters()):
            placement = Shard(tensor_parallel if parameter.ndim == 3 else 0)
            if key.endswith("gamma"):
                placement = Shard(0) if tensor_parallel == 0 and parameter.ndim == 2 else Replicate()
            shard = distribute_tensor(parameter.detach(), mesh["tp"], [placement], src_data_rank=None)
            setattr(module, key, nn.Parameter(shard))
    names = tuple(name for name in degrees if name != "tp")
    fully_shard(
        module,
        mesh=mesh[names],
        shard_placement_fn=lambda p: Shard(fsdp_dim if p.ndim == 3 else 0),
    )
    dist.all_to_all_single = counted
    found = train(module, like)
    differences = {}
    for name, tensor in expected.items():
        result = found[name]
        assert result.shape == tensor.shape, name
        mine = like(tensor, result)._local_tensor if isinstance(result, DTensor) else tensor
        local = result._local_tensor if isinstance(result, DTensor) else result
        assert mine.shape == local.shape, name
        differences[name] = ((local - mine).abs().max() / tensor.abs().max()).item() if mine.numel() else 0.0
    return differences, sum(sent)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sharded_cuts_equal_whole_ones(layout):
    ranks = run_ranks(math.prod(layout[0].values()), _on_ranks, *layout)
    for differences, sent in ranks:
        assert max(differences.values()) < 1e-12, max(differences, key=differences.get)
        # ranks that hold whole experts compute them without an exchange, which then has the other weights alone
        holds_whole = layout[2] == 0 and layout[1] in (None, 0)
        assert (sent < 3000) == holds_whole, sent
