"""`pc.owner` on real ranks: full matrices on one owner under every mesh, equal to one process bit for bit."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from helpers.ranks import run_ranks
from pc import owner
from pc.config import PCConfig
from pc.passes import materialise, pull_back
from pc.spectral import initial_vectors

# Over three ranks some shards are smaller, over two times three some are empty.
SHAPES = [(7, 5), (5, 7), (3, 10), (4, 4), (10, 3), (1, 6)] * 2
# The pass, its inputs, its outputs.
PASSES = {
    "materialise": (materialise, ("weight", "gamma", "u", "v"), ("weight", "u", "v")),
    "pull back": (pull_back, ("weight", "gradient", "gamma", "u", "v"), ("gradient", "gamma")),
}
MESHES = {
    "FSDP3": {"fsdp": 3},
    "TP2 x FSDP3": {"fsdp": 3, "tp": 2},
    "TP2 x HSDP2x2": {"replicate": 2, "fsdp": 2, "tp": 2},
}


def _tensors(index: int) -> dict[str, torch.Tensor]:
    """W, gradient, gamma, u and v of a layer in float64."""
    generator = torch.Generator().manual_seed(index)
    weight, gradient = (torch.randn(SHAPES[index], generator=generator, dtype=torch.float64) for _ in range(2))
    u, v = (vector.double() for vector in initial_vectors(str(index), SHAPES[index]))
    return {"weight": weight, "gradient": gradient, "gamma": torch.full((1,), 1.5).double(), "u": u, "v": v}


def _run(name: str, layers: list[dict[str, torch.Tensor]], seen: list) -> tuple[list[tuple], owner.Plan]:
    """A pass of PC over all layers; `seen` gets the index of each matrix computed here."""
    of_pass, given, wanted = PASSES[name]

    def function(index, *batch):
        seen.append(index)
        return of_pass(PCConfig(level=4), *batch)

    inputs = [tuple(layer[key] for key in given) for layer in layers]
    outputs = [tuple(layer[key].clone() for key in wanted) for layer in layers]
    plan = owner.Plan(inputs, outputs, keys=range(len(layers)))
    plan.run(function, inputs, outputs)
    return outputs, plan


def _sharded(mesh, index: int, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the trainer has them: tensor parallelism by `distribute_tensor`, then FSDP2."""
    module = nn.ParameterDict()
    for name in full.keys() - {"u", "v"}:
        tensor = full[name]
        if "tp" in mesh.mesh_dim_names:
            placement = Replicate() if name == "gamma" else Shard(index % 2)
            tensor = distribute_tensor(tensor, mesh["tp"], [placement], src_data_rank=None)
        module[name] = nn.Parameter(tensor)
    fully_shard(module, mesh=mesh[tuple(name for name in mesh.mesh_dim_names if name != "tp")])
    sharded = {name: parameter.detach() for name, parameter in module.items()}
    weight = sharded["weight"]
    return {**sharded, **{name: owner.shard_like(weight, full[name]) for name in ("u", "v")}}


def _on_ranks(rank, degrees):
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    whole = [_tensors(index) for index in range(len(SHAPES))]
    owner.BUCKET_BYTES = 300  # several buckets
    sent, exchange = [], dist.all_to_all_single

    def counted(receive, send, receive_sizes, send_sizes, group):
        sent.append(sum(send_sizes) - send_sizes[dist.get_rank(group)])
        return exchange(receive, send, receive_sizes, send_sizes, group=group)

    owner.dist.all_to_all_single = counted
    found = {}
    for name, (_, _, wanted) in PASSES.items():
        seen, sent[:] = [], []
        results, plan = _run(name, [_sharded(mesh, index, full) for index, full in enumerate(whole)], seen)
        found[name] = seen, list(sent)
        assert (plan.calls, plan.bytes_sent) == (len(sent), sum(sent) * 8)
        assert [index for index, owners in enumerate(plan.owners) if owners == [rank]] == sorted(seen)
        assert plan.work[rank] == sum(owner.matrix_cost(SHAPES[index]) for index in seen)
        for index, expected in enumerate(_run(name, whole, [])[0]):
            expected = _sharded(mesh, index, whole[index] | dict(zip(wanted, expected, strict=True)))
            for key, result in zip(wanted, results[index], strict=True):
                assert result.placements == expected[key].placements
                assert torch.equal(owner.local(result), owner.local(expected[key])), (name, index, key)
        with torch.no_grad():  # a control: the last digit of one input
            whole[0]["weight"][0, 0] *= 1 + 1e-15
        other = _sharded(mesh, 0, whole[0] | dict(zip(wanted, _run(name, whole[:1], [])[0][0], strict=True)))
        assert owner.local(results[0][0]).numel() == 0 or not torch.equal(
            owner.local(results[0][0]), owner.local(other[wanted[0]])
        )
    return found


@pytest.mark.parametrize("degrees", MESHES.values(), ids=MESHES)
def test_each_matrix_is_worked_on_once_and_bit_for_bit(degrees):
    ranks = run_ranks(math.prod(degrees.values()), _on_ranks, degrees)
    replicas = degrees.get("replicate", 1)
    for name in PASSES:
        counts = {len(sent) for _, sent in (found[name] for found in ranks)}
        assert len(counts) == 1 and counts.pop() in range(4, 20, 2)  # two for each bucket
        worked_on = sorted(index for found in ranks for index in found[name][0])
        assert worked_on == sorted(list(range(len(SHAPES))) * replicas)  # each replica for itself
        # No input element is sent twice, even if tensor-parallel ranks have copies of a vector.
        elements = sum(_tensors(index)[key].numel() for index in range(len(SHAPES)) for key in PASSES[name][1])
        assert sum(sum(found[name][1][::2]) for found in ranks) < replicas * elements


def _refusals(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    item = (torch.ones(8, 2),)
    on_submesh = distribute_tensor(torch.ones(8, 2), mesh["tp"], [Shard(0)])
    on_mesh = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0), Shard(1)])
    partial = torch.distributed.tensor.DTensor.from_local(torch.ones(8, 2), mesh, [Partial(), Shard(0)])
    # every second row: no block
    strided = torch.distributed.tensor.DTensor.from_local(
        torch.ones(2, 2), mesh, [Shard(0), torch.distributed.tensor.placement_types._StridedShard(0, split_factor=2)]
    )
    messages = []
    for inputs in ((on_mesh, on_submesh), (partial,), (strided,)):
        try:
            owner.run_on_owners(lambda key, *x: x[:1], [inputs], [item])
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_has_no_blocks_is_refused():
    one_mesh, partial, strided = run_ranks(4, _refusals)[0]
    assert "one device mesh" in one_mesh and "shards that are blocks" in partial and "shards that are blocks" in strided
