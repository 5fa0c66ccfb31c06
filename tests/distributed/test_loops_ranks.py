"""The loops of docs/loops.md on several ranks: equal on all of them, and to one process, in float64 on gloo."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import pc
from helpers.ranks import run_ranks
from helpers.toy import ToyBlock, toy_batch, toy_loss, toy_model
from pc import PCConfig, owner_functions

CONFIG = PCConfig(blocks=("*attention.wo", "*feed_forward.*"))


class Wrapped(nn.Module):
    """As a LightningModule has its network."""

    def __init__(self):
        super().__init__()
        self.net = toy_model()

    def forward(self, x):
        return self.net(x)


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model, precondition_with, rank=0, world=1, make=torch.optim.SGD, steps=3):
    """W, gamma and PC(W) after some steps; each rank has its share of four micro-batches."""
    optimizer = make(model.parameters(), lr=0.05)
    preconditioner = precondition_with(optimizer)
    for step in range(steps):
        for i in range(rank, 4, world):
            (toy_loss(model, toy_batch(100 * step + i)) * world / 4).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()
    return preconditioner, results(preconditioner)


def results(preconditioner):
    return {
        name.removeprefix("net."): [full(t) for t in (w.raw, w.gamma, w.parameter)]
        for name, w in preconditioner.weights.items()
    }


def alone(make=torch.optim.SGD, steps=3):
    model = pc.attach(toy_model(), CONFIG)
    return train(model, lambda optimizer: pc.precondition(model, optimizer), make=make, steps=steps)[1]


def require_equal(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for tensor, other in zip(found[name], tensors, strict=True):
            torch.testing.assert_close(tensor, other, rtol=0, atol=tolerance, msg=name)


def _order(rank, order):
    model = Wrapped() if order == "submodule" else toy_model()
    inner = pc.attach(model.net if order == "submodule" else model, CONFIG)
    if order == "preconditioner, DDP":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        preconditioner = pc.precondition(model, optimizer)
        model = DDP(model)
        return train_by(model, optimizer, preconditioner, rank)
    if order == "checkpointing, DDP":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, ToyBlock))
    if order == "compile, DDP":
        model = torch.compile(model, backend="eager")
    model = DDP(model)
    if order == "DDP, compile":
        model = torch.compile(model, backend="eager")
    return train(model, lambda o: pc.precondition(inner if order == "submodule" else model, o), rank, 2)[1]


def train_by(model, optimizer, preconditioner, rank):
    for step in range(3):
        for i in range(rank, 4, 2):
            (toy_loss(model, toy_batch(100 * step + i)) / 2).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()
    return results(preconditioner)


@pytest.mark.parametrize(
    "order", ["compile, DDP", "DDP, compile", "submodule", "checkpointing, DDP", "preconditioner, DDP"]
)
def test_ddp_in_any_order(order):
    one, other = run_ranks(2, _order, order)
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True))
    require_equal(one, alone())


def _from_meta(rank, how):
    """A start from full plain weights, training, and a resume from states of torch's distributed checkpoints."""
    given = toy_model().state_dict()
    mesh = init_device_mesh("cpu", (2,))

    def make():
        with torch.device("meta"):
            model = toy_model_on_meta()
        pc.attach(model, CONFIG)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if how == "broadcast":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, dict(given) if rank == 0 else {}, options=options)
        else:
            sharded = {
                name: torch.distributed.tensor.distribute_tensor(given[name], mesh, p.placements)
                for name, p in model.named_parameters()
            }
            model.load_state_dict(sharded, assign=True)
        return model

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    preconditioner = pc.precondition(model, optimizer)
    train_fsdp(model, optimizer, preconditioner, rank, 0)
    whole = StateDictOptions(full_state_dict=True)
    saved = [
        get_model_state_dict(model, options=whole),
        get_optimizer_state_dict(model, optimizer, options=whole),
        {
            name: {k: full(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            for name, values in preconditioner.state_dict().items()
        },
    ]
    saved, found = copy.deepcopy(saved), results(preconditioner)
    assert saved[0].keys() == given.keys()
    train_fsdp(model, optimizer, preconditioner, rank, 1)
    straight = results(preconditioner)

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    preconditioner = pc.precondition(model, optimizer)
    saved = [None if rank and how == "broadcast" else state for state in saved[:2]] + saved[2:]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "broadcast")
    set_model_state_dict(model, saved[0] or {}, options=options)
    set_optimizer_state_dict(model, optimizer, saved[1] or {}, options=options)
    preconditioner.load_state_dict(saved[2])
    train_fsdp(model, optimizer, preconditioner, rank, 1)
    return found, straight, results(preconditioner)


def toy_model_on_meta():
    return nn.Sequential(*(ToyBlock(7, 10) for _ in range(2))).double()


def train_fsdp(model, optimizer, preconditioner, rank, step):
    for i in range(rank, 4, 2):
        (toy_loss(model, toy_batch(100 * step + i)) / 2).backward()
    preconditioner.pull_back()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("how", ["broadcast", "assign"])
def test_fsdp2_from_meta(how):
    """Its standard start; resumed with the moments of gammas too."""
    expected = alone(torch.optim.AdamW, steps=1)
    for found, straight, resumed in run_ranks(2, _from_meta, how):
        require_equal(found, expected, 1e-9)  # AdamW divides by root mean squares near zero
        require_equal(resumed, straight, 0.0)
    assert (straight["0.attention.wo"][1] - found["0.attention.wo"][1]).abs() > 1e-3  # control: gamma moves


def _fsdp1(rank):
    model = FullyShardedDataParallel(
        pc.attach(toy_model(), CONFIG), use_orig_params=True, device_id=torch.device("cpu")
    )
    with pytest.raises(pc.UserError, match="FSDP1 makes weights parts of one flat parameter; shard with fully_shard"):
        pc.precondition(model, torch.optim.SGD(model.parameters(), lr=0.05))


def test_fsdp1_is_refused():
    run_ranks(1, _fsdp1)


def _share(rank, given):
    """Weights computed by this rank in a step, and the results; `given`: what pc.precondition gets."""
    model = pc.attach(toy_model(), CONFIG)
    trained = DDP(model)
    computed = {"write": 0, "pull_back": 0}
    for name in computed:

        def counted(split, raw, *rest, function=getattr(owner_functions, name), name=name, **options):
            computed[name] += len(raw)
            return function(split, raw, *rest, **options)

        setattr(owner_functions, name, counted)
    group = dist.group.WORLD if given == "group" else None
    preconditioner, found = train(
        trained,
        lambda o: pc.precondition(trained if given == "DDP" else model, o, process_group=group),
        rank,
        dist.get_world_size(),
    )
    # one rank alone may read the state where an optimizer has yet to step
    preconditioner.restore_raw()
    if rank == 0:
        model.state_dict()
    trained(toy_batch(0))
    if rank == 0:
        pc.merge(model)
    return computed, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_ddp_share_the_work(ranks):
    """Each of eight matrices, in each step and at the start, on one rank; without a group on all."""
    expected = alone()
    for given in ("DDP", "group", "model"):
        found = run_ranks(ranks, _share, given)
        extra = 8  # the last write_pc, of each rank alone
        pulled = [computed["pull_back"] for computed, _ in found]
        written = [computed["write"] - extra for computed, _ in found]
        if given == "model":
            assert pulled == [3 * 8] * ranks and written == [4 * 8] * ranks
        else:
            assert sum(pulled) == 3 * 8 and max(pulled) == 3 * 8 // ranks
            assert sum(written) == 4 * 8 and max(written) == 4 * 8 // ranks
        for _, result in found:
            require_equal(result, expected)
            assert all(torch.equal(a, b) for n in result for a, b in zip(result[n], found[0][1][n], strict=True))


def _unequal(rank):
    model = pc.attach(toy_model(), CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    preconditioner = pc.precondition(model, optimizer, process_group=dist.group.WORLD)
    toy_loss(model, toy_batch(0)).backward()
    if rank:
        model[0].attention["wo"].weight.data.mul_(1.01)
    with pytest.raises(pc.UserError, match="was changed while it held PC"):
        preconditioner.pull_back()


def test_a_change_on_one_replica_is_said_on_all():
    run_ranks(2, _unequal)


class Routed(nn.Module):
    """A dense layer with a norm, and two experts of which only the first gets tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.experts = nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, x):
        x = self.norm(self.dense(x))
        expert = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return x @ expert[0] * (dist.get_rank() == 0)


def _without_tokens(rank, lr):
    """Experts on a rank each, in an optimizer of their own, and in one with the rest whose groups do not mix kinds."""
    config = PCConfig(blocks=("*experts", "*dense"), splits={"experts": pc.MatrixSplit(("up",))})
    model = pc.attach(Routed(), config)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model.experts = nn.Parameter(distribute_tensor(model.experts.data, mesh, [Shard(0)]))
    dense = [p for p in model.parameters() if p is not model.experts]
    groups = [{"params": dense}, {"params": [model.experts]}]
    optimizers = [torch.optim.AdamW(group["params"], lr=lr) for group in groups]
    if lr:
        optimizers = [torch.optim.AdamW(groups, lr=lr, foreach=True)]
    preconditioner = pc.precondition(model, *optimizers)
    model(torch.randn(5, 6)).square().mean().backward()
    preconditioner.pull_back()
    for optimizer in optimizers:
        optimizer.step()
    assert preconditioner.holds_pc
    model(torch.randn(5, 6))
    return [full(w.gamma) for w in preconditioner.weights.values() if isinstance(w.parameter, DTensor)]


@pytest.mark.parametrize("lr", [0.0, 1e-2])
def test_a_rank_without_gradients_goes_on_as_the_others(lr):
    """Also in a first step of rate 0, as schedules of Hugging Face begin, which looks like the one that creates state."""
    (first,), (second,) = run_ranks(2, _without_tokens, lr)
    assert torch.equal(first, second) and (first[0] == 1.0) == (lr == 0.0)


def _asks_alone(rank):
    """One replica asks for its optimizer's state before the first step, as where rank 0 alone saves."""
    model = pc.attach(toy_model(), CONFIG)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    preconditioner = pc.precondition(ddp, optimizer)
    if rank == 0:
        get_optimizer_state_dict(model, optimizer)
    toy_loss(ddp, toy_batch(rank)).backward()
    preconditioner.pull_back()
    optimizer.step()
    return results(preconditioner)


def test_one_replica_may_ask_for_the_state_alone():
    first, second = run_ranks(2, _asks_alone)
    require_equal(first, second)


def _zero(rank):
    """With PC first, ZeRO's optimizer has the gammas when it divides its parameters; later it would not look at them."""
    model = pc.attach(toy_model(), CONFIG)
    ddp = DDP(model)
    with pytest.raises(pc.UserError, match="ZeroRedundancyOptimizer"):
        pc.precondition(ddp, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05))
    preconditioner = pc.precondition(ddp)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    preconditioner.follow(optimizer)
    preconditioner.write_pc()
    return train_by(ddp, optimizer, preconditioner, rank)


def test_zero_redundancy_optimizer():
    for found in run_ranks(2, _zero):
        require_equal(found, alone())
