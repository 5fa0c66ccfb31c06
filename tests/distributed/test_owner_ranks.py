"""`pc.owner` on sharded weights: its example against one process, in float64, and what it refuses."""

import importlib.util
import itertools
import math
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import pc.step
from helpers.ranks import run_ranks, sharded, unsharded
from helpers.tiny import ROOT
from pc import owner
from pc.shards import local

SHAPES = [(10, 4), (4, 8), (7, 5), (1, 6)]  # two ranks: even, even, uneven, empty; three: uneven, and empty
MESHES = {
    "FSDP3": {"fsdp": 3},
    "TP2 x FSDP3": {"fsdp": 3, "tp": 2},
    "HSDP2x2": {"replicate": 2, "fsdp": 2},
}


def _shampoo(weights):
    spec = importlib.util.spec_from_file_location("shampoo", ROOT / "examples" / "shampoo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Shampoo(weights, lr=0.1)


def _draw(seed, index):
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _train(shard, last=2):
    """Weights after three steps on drawn gradients; `last` is the seed of the last ones."""
    weights = shard([_draw(100 + index, index) for index in range(len(SHAPES))])
    optimizer = _shampoo(weights)
    for step in (0, 1, last):
        gradients = shard([_draw(10 * step + index, index) for index in range(len(SHAPES))])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.detach()
        optimizer.step()
    return [weight.detach() for weight in weights]


def _on_ranks(rank, degrees):
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    owner.BUCKET_BYTES = 300  # several buckets, of one matrix or two
    found = _train(lambda x: sharded(mesh, x))
    differences = []
    for last in (2, 3):  # 2: the same gradients; 3, a control: others in the last step
        expected = sharded(mesh, _train(unsharded, last))
        pairs = [(local(a), local(b)) for a, b in zip(found, expected, strict=True)]
        differences.append(max((a - b).abs().max().item() for a, b in pairs if a.numel()))
    return differences


@pytest.mark.parametrize("degrees", MESHES.values(), ids=MESHES)
def test_sharded_equals_one_process(degrees):
    for difference, control in run_ranks(math.prod(degrees.values()), _on_ranks, degrees):
        # rounding of a few float64 operations on numbers near 1
        assert difference < 1e-12 < 1e-3 < control


def _in_mesh_order(rank, ranks):
    """For an even and an uneven matrix: how far the result, and as a control the input, is from f of the whole matrix."""
    mesh = DeviceMesh("cpu", ranks)
    if mesh.get_coordinate() is None:
        return []

    def shard(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0), Shard(1)][: mesh.ndim], src_data_rank=None)

    found = []
    for whole in (_draw(0, 1), _draw(0, 2)):
        item, wanted = (shard(whole),), local(shard(torch.linalg.pinv(whole).mT))
        before = local(item[0]).clone()
        owner.Plan([item], [item]).run(lambda _, x: (torch.linalg.pinv(x).mT,), [item], [item])
        found.append([(wanted - x).abs().max().item() for x in (local(item[0]), before)])
    return found


# the process group is one mesh dimension, all ranks, some ranks
@pytest.mark.parametrize("ranks, world", [([1, 0], 2), ([[0, 2], [1, 3]], 4), ([[0, 2], [1, 3]], 5)])
def test_the_ranks_of_a_mesh_may_have_any_order(ranks, world):
    for difference, control in itertools.chain(*run_ranks(world, _in_mesh_order, ranks)):
        assert difference < 1e-12 < 1e-3 < control  # rounding as above


def _refusals(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    on_submesh = distribute_tensor(torch.ones(8, 2), mesh["tp"], [Shard(0)])
    on_mesh = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0), Shard(1)])
    partial = DTensor.from_local(torch.ones(8, 2), mesh, [Partial(), Shard(0)])
    # every second row: no slice
    strided = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), _StridedShard(0, split_factor=2)])
    messages = []
    for inputs in ((on_mesh, on_submesh), (partial,), (strided,)):
        with pytest.raises(ValueError) as raised:
            owner.Plan([inputs], [(torch.ones(8, 2),)])
        messages.append(str(raised.value))
    return messages


def test_what_has_no_slices_is_refused():
    one_mesh, partial, strided = run_ranks(4, _refusals)[0]
    assert "one device mesh" in one_mesh and "shards that are slices" in partial and "shards that are slices" in strided


def _page(rank):
    """The program of docs/owner.md, as printed."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "owner.md").read_text(), re.DOTALL)
    names = {}
    exec(program, names)
    values = torch.stack([torch.linalg.svdvals(weight.detach().full_tensor()) for weight in names["weights"]])
    return values


def test_the_page_runs_on_2_x_4_ranks():
    for values in run_ranks(8, _page):
        torch.testing.assert_close(values, torch.ones(16, 48))  # float32 of singular values


def _beside_a_weight_of_its_own(rank, room):
    """What W becomes if the first rank has another weight that no other knows."""
    pc.step.KEPT_W_BYTES = room
    torch.manual_seed(0)
    model = nn.ModuleDict({"dense": nn.Linear(8, 8, bias=False)})
    if rank == 0:
        model["own"] = nn.Linear(8, 8, bias=False)
    pc.attach(model, pc.PCConfig(blocks=("*",)))
    fully_shard(model["dense"], mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    preconditioner = pc.precondition(model, optimizer)
    sum(layer(torch.ones(4, 8)).tanh().square().mean() for layer in model.values()).backward()
    preconditioner.pull_back()
    optimizer.step()
    return model["dense"].weight_orig.full_tensor().tolist()


def test_what_an_owner_keeps_does_not_depend_on_weights_of_one_rank_alone():
    bytes_of_w = 4 * 8 * 8
    found = [run_ranks(2, _beside_a_weight_of_its_own, room) for room in (0, bytes_of_w)]
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]
