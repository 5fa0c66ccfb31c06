"""What a step of the 1B model exchanges and computes on 8 ranks, counted without weights and without network.

Shapes are real, data is not: tensors are on the meta device, and the process group is torch's fake one. Each
rank is played in turn with the trainer's own model, sharding, PC and Muon.
"""

import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.models.llama3.infra.parallelize import apply_fsdp

import pc
from pc.owner import BUCKET_BYTES, assign, buckets
from pc.step import LayerState, _distribute_like
from pc.titan.llama2 import FLAVORS, Llama2

WORLD, LAYERS, D, F = 8, 18, 2048, 5632
FFN = [(F, D), (D, F), (F, D)]


@dataclass
class Exchange:
    """What one rank's all-to-alls carry, counted where `pc.owner` calls them."""

    rank: int
    calls: int = 0
    sent: int = 0
    """bytes to other ranks"""
    received: int = 0
    """bytes from other ranks"""

    def __call__(self, receive, send, receive_sizes, send_sizes, group) -> None:
        assert (sum(receive_sizes), sum(send_sizes)) == (receive.numel(), send.numel())
        self.calls += 1
        self.sent += (send.numel() - send_sizes[self.rank]) * send.element_size()
        self.received += (receive.numel() - receive_sizes[self.rank]) * receive.element_size()


class OtherCollectives(TorchDispatchMode):
    """Counts every collective that is called in another way, those inside DTensor included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@dataclass
class Played:
    exchange: Exchange
    operations: int
    others: Counter[str]


@pytest.fixture
def play(monkeypatch):
    """`play(rank, prepare, action)`: `action(prepare())` with the model sharded as on `rank` of 8, counted."""
    # PC refuses weights on the meta device, because starting vectors are data. Here shapes are enough.
    monkeypatch.setattr("pc.step._initial_state", _state_of_shapes)

    def run(rank, prepare, action) -> Played:
        exchange = Exchange(rank)
        monkeypatch.setattr(dist, "all_to_all_single", exchange)
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        try:
            prepared = prepare(_sharded_model())
            with FlopCounterMode(display=False) as flops, OtherCollectives() as others:
                action(prepared)
            return Played(exchange, flops.get_total_flops(), others.counts)
        finally:
            dist.destroy_process_group()

    return run


def _sharded_model() -> torch.nn.Module:
    """The 1B model as `pc.titan.parallelize` shards it, with a gradient on each parameter."""
    with torch.device("meta"):
        model = pc.attach(Llama2(FLAVORS["1B"]), pc.PCConfig(schedule="step"))
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return model


def _state_of_shapes(name, layer) -> LayerState:
    weight = layer.weight
    u, v = (_distribute_like(weight, torch.empty(size, device="meta")) for size in weight.shape)
    return LayerState(layer, weight, layer.gamma, weight.detach().clone(), u, v)


def _after_optimizer(model):
    schedule = pc.StepSchedule(model)
    assert {name.rpartition(".")[2] for name in schedule.layers} == {"wo", "w1", "w2", "w3"}
    return schedule


def _after_backward(model):
    schedule = _after_optimizer(model)
    schedule.weights_are_raw = False
    return schedule


def _muon(model):
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
    assert len(hidden) == 7 * LAYERS
    return pc.Muon(hidden, lr=1e-3, adjust_lr_fn="match_rms_adamw")


@pytest.mark.parametrize(
    "prepare, action, shapes, input_bytes, output_bytes",
    [
        # W and the gradient of PC(W) go to the owner, that of W comes back
        (_after_backward, pc.StepSchedule.pull_back, [(D, D), *FFN] * LAYERS, 8, 4),
        (_after_optimizer, pc.StepSchedule.materialise, [(D, D), *FFN] * LAYERS, 4, 4),
        # updates travel in bfloat16
        (_muon, pc.Muon.step, [*[(D, D)] * 4, *FFN] * LAYERS, 2, 2),
    ],
    ids=["pull back", "materialise", "Muon"],
)
def test_collectives_bytes_and_operations(play, prepare, action, shapes, input_bytes, output_bytes):
    elements = [math.prod(shape) for shape in shapes]
    owners = assign([float(min(shape)) ** 2 * max(shape) for shape in shapes], WORLD)
    num_buckets = len(buckets(owners, [input_bytes * n for n in elements], BUCKET_BYTES))
    ranks = [play(rank, prepare, action) for rank in range(WORLD)]

    # u, v and gamma travel too: less than a thousandth
    bytes_moved = sum(elements) * (input_bytes + output_bytes) * (WORLD - 1) / WORLD
    for played in ranks:
        assert played.exchange.calls == 2 * num_buckets
        assert not played.others
        # An eighth lies on each rank; the busiest owner has 8 % more than an eighth of the work.
        assert 0.88 < played.exchange.sent * WORLD / bytes_moved < 1.12
        assert 0.88 < played.exchange.received * WORLD / bytes_moved < 1.12
    assert sum(p.exchange.sent for p in ranks) == sum(p.exchange.received for p in ranks)
    assert sum(p.exchange.sent for p in ranks) == pytest.approx(bytes_moved, rel=1e-3)

    operations = [played.operations for played in ranks]
    assert max(operations) / sum(operations) < 0.15  # an eighth is 0.125
    # nothing is done twice: together they do what one rank does with whole matrices
    assert sum(operations) == play(0, lambda model: _whole(prepare(model)), action).operations


def _whole(prepared):
    """The same on unsharded tensors."""

    def whole(tensor):
        full = torch.nn.Parameter(torch.empty(tensor.shape, device="meta"))
        full.grad = torch.empty_like(full)
        return full

    if isinstance(prepared, pc.Muon):
        return pc.Muon([whole(p) for p in prepared.param_groups[0]["params"]], lr=1e-3)
    for state in prepared.layers.values():
        assert isinstance(state.raw, DTensor)
        state.weight, state.gamma = whole(state.weight), whole(state.gamma)
        state.raw, state.u, state.v = (whole(t).detach() for t in (state.raw, state.u, state.v))
    return prepared


def test_the_count_notices_other_collectives(play):
    """A control: gathering a DTensor is seen."""

    def gather(model):
        weight = model.layers["0"].feed_forward.w1.weight
        shard = torch.zeros(weight.to_local().shape)
        DTensor.from_local(shard, weight.device_mesh, weight.placements).full_tensor()

    played = play(3, lambda model: model, gather)
    assert played.others and not played.exchange.calls
