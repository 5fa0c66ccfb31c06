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
            parameter = schedule.weights[name].parameter
            parameter.grad = change(draw(100 * step + i, WEIGHTS[name][0]), parameter)
        schedule.pull_back()
        for name, state in schedule.weights.items():
            results |= {f"{name} gradient {step}": state.parameter.grad, f"{name} gamma {step}": state.gamma.grad}
        optimizer.step()
        optimizer.zero_grad()
    for name, state in schedule.weights.items():
        results |= {f"{name} {key}": getattr(state, key).detach() for key in ("parameter", "raw", "gamma", "u", "v")}
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


class Stage(nn.Module):
    """A fused weight, a stack and a transposed one in a forward pass, for x [7, 4] to [7, 4]."""

    def __init__(self, seed):
        super().__init__()
        shapes = {"gate_up": (3, 12, 7), "down": (3, 6, 7), "qkv": (20, 7), "transposed": (7, 10)}
        self.weights = nn.ParameterDict(
            {n: nn.Parameter(0.3 * draw(seed + i, s)) for i, (n, s) in enumerate(shapes.items())}
        )

    def forward(self, x):
        gate, up = (self.weights["gate_up"] @ x).chunk(2, 1)
        x = x + (self.weights["down"].mT @ (torch.tanh(gate) * up)).sum(0)
        x = x + (self.weights["qkv"].T @ torch.tanh(self.weights["qkv"] @ x))
        return x + self.weights["transposed"] @ torch.tanh(self.weights["transposed"].T @ x)


STAGED = PCConfig(
    level={"q": 2, "o": 4, "ffn": 1},
    blocks=("q", "o", "ffn"),  # k and v stay as they are
    cuts={
        "*gate_up": Cut(("gate", "up")),
        "*down": Cut(("down",), transposed=True),
        "*qkv": Cut(("q", "k", "v"), sizes=(3, 1, 1), head_dim=4),
        "*transposed": Cut(("o",), transposed=True),
    },
)


def _staged():
    """Two stages in a model, so that names, which seed the vectors, are those of the whole."""
    return nn.ModuleDict({"0": Stage(0), "1": Stage(10)})


def _trained(parts, step):
    """Names and values of what two steps change."""
    schedule = pc.schedule(parts)
    schedule.materialise()
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    schedule.follow(optimizer)
    for index in range(2):
        for micro in range(3):
            step(draw(100 + 10 * index + micro, (7, 4)))
        schedule.pull_back()
        optimizer.step()
        optimizer.zero_grad()
    return {
        f"{name} {key}": getattr(state, key).detach()
        for name, state in schedule.weights.items()
        for key in ("parameter", "raw", "gamma", "u", "v")
    }


def _on_stages(rank, fsdp):
    """Each pair of ranks is a pipeline; activations and their gradients are sent by hand."""
    mesh = init_device_mesh("cpu", (2, fsdp), mesh_dim_names=("pp", "fsdp"))
    stage, other = mesh.get_coordinate()[0], rank + fsdp if rank < fsdp else rank - fsdp
    whole = pc.attach(_staged(), STAGED)
    del whole[str(1 - stage)]
    if fsdp > 1:
        fully_shard(whole[str(stage)], mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(0))
        whole[str(stage)].set_gradient_divide_factor(1.0)
        whole[str(stage)].set_force_sum_reduction_for_comms(True)

    def step(x):
        part = whole[str(stage)]
        if stage == 0:
            output = part(x)
            dist.send(output.detach(), other)
            gradient = torch.empty_like(output)
            dist.recv(gradient, other)
            output.backward(gradient / fsdp)
        else:
            received = torch.empty_like(x)
            dist.recv(received, other)
            (part(received.requires_grad_()).square().mean() / fsdp).backward()
            dist.send(received.grad * fsdp, other)

    found = _trained([whole], step)
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}


@pytest.mark.parametrize("fsdp", [1, 2])
def test_cut_weights_on_pipeline_stages_equal_one_process(fsdp):
    whole = pc.attach(_staged(), STAGED)
    expected = _trained([whole], lambda x: whole["1"](whole["0"](x)).square().mean().backward())
    found = {name: tensor for of_rank in run_ranks(2 * fsdp, _on_stages, fsdp) for name, tensor in of_rank.items()}
    assert found.keys() == expected.keys() and len(expected) == 40
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-12 * tensor.abs().max(), name
    # control: training moved the weights
    assert (expected["0.weights.qkv raw"] - _staged()["0"].weights["qkv"]).abs().max() > 1e-4


def test_cut_weights_are_preserved_and_merged():
    """PC(W) is the given weight, rows without PC are untouched, and the merged model is the plain one."""
    plain, x = _staged(), draw(1, (7, 4))
    expected = plain["1"](plain["0"](x))
    model = pc.attach(_staged(), STAGED, preserve=True)
    schedule = pc.schedule(model)
    schedule.materialise()
    found = model["1"](model["0"](x))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # an epsilon of 1e-7 beside norms near 1
    for state in schedule.weights.values():
        # control: W is another weight
        assert (state.raw - plain.get_parameter(state.name)).abs().max() > 1e-2, state.name
    merged = pc.merge(model)
    assert torch.equal(merged["1"](merged["0"](x)), found)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in merged.named_parameters()] == [name for name, _ in plain.named_parameters()]
