"""The loops of docs/loops.md on several ranks: all ranks have equal results, which equal those of one process, in float64
on gloo."""

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import pc
from helpers.ranks import run_ranks
from helpers.toy import (
    InGraph,
    Loop,
    ToyBlock,
    expected_pc,
    one_for_each_block,
    require_near,
    require_pc,
    toy_batch,
    toy_loss,
    toy_model,
    whole,
)
from pc import PCConfig, UserError
from pc.layer import PCLinear, put_in_graph
from pc.splits import WeightSplit

SETTINGS = {"blocks": ("*attention.wo", "*feed_forward.*")}
CONFIG = PCConfig(**SETTINGS)
MICRO_BATCHES = 4  # over all ranks


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


# --- how a model is wrapped


class Wrapped(nn.Module):
    """Holds its network in an attribute, like a LightningModule."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


def compiled(model):
    return torch.compile(model, backend="eager")


def checkpointed(model):
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, ToyBlock))
    return model


def sharded(model, **options):
    for block in model:
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)


WRAPS = {
    "DDP": DDP,
    "compile, DDP": lambda model: DDP(compiled(model)),
    "DDP, compile": lambda model: compiled(DDP(model)),
    "checkpointing, DDP": lambda model: DDP(checkpointed(model)),
    "DDP around more": lambda model: DDP(Wrapped(model)),
    "bucket views": partial(DDP, gradient_as_bucket_view=True),
    "unused parameters": partial(DDP, find_unused_parameters=True),
    "FSDP2": sharded,
    "FSDP2, gathered weights stay": partial(sharded, reshard_after_forward=False),
    "FSDP2, offload": partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "FSDP2, compile": lambda model: compiled(sharded(model)),
}


# --- how a step is taken


def accumulate(loop, share):
    for batch in share:
        loop.backward(batch, loop.scale)
    loop.pull_back()
    loop.update()


def synchronise_once(loop, share):
    """Gradients are averaged over ranks only after the last micro-batch."""
    *earlier, last = share
    is_ddp = hasattr(loop.model, "no_sync")
    with loop.model.no_sync() if is_ddp else contextlib.nullcontext():
        if not is_ddp:
            loop.model.set_requires_gradient_sync(False)
        for batch in earlier:
            loop.backward(batch, loop.scale)
        with pytest.raises(UserError, match=r"within no_sync\(\)" if is_ddp else "found no gradient"):
            loop.pull_back()
    if not is_ddp:
        loop.model.set_requires_gradient_sync(True)
    loop.backward(last, loop.scale)
    loop.pull_back()
    loop.update()


def pull_back_each(loop, share):
    for batch in share:
        loop.backward(batch, loop.scale)
        loop.pull_back()
    loop.update()


def skip(loop, share):
    loop.backward(99)
    loop.zero_grad()
    accumulate(loop, share)


def by_closure(loop, share):
    def closure():
        loop.zero_grad()
        return sum(loop.backward(batch, loop.scale) for batch in share)

    loop.optimizer.step(closure)


def only_one_steps(loop, share):
    """One optimizer is skipped in the first step: every rank writes PC(W) before its next forward pass."""
    for batch in share:
        loop.backward(batch, loop.scale)
    loop.pull_back()
    for optimizer in loop.optimizers[: 1 if 0 in share or 1 in share else 2]:
        optimizer.step()
    loop.zero_grad()


STEPS = {
    "accumulation": accumulate,
    "synchronised once": synchronise_once,
    "pull back per micro-batch": pull_back_each,
    "skipped steps": skip,
    "closure": by_closure,
    "a skipped optimizer": only_one_steps,
}
CASES = [
    *((wrap, "accumulation") for wrap in WRAPS),
    *((wrap, step) for step in [*STEPS][1:] for wrap in ("bucket views", "FSDP2, gathered weights stay")),
]


def train(loop, take_step, rank=0, world=1, steps=3):
    """W, gamma and PC(W) after some steps; each rank has its share of the micro-batches."""
    loop.scale = world / MICRO_BATCHES
    for step in range(steps):
        take_step(loop, [100 * step + i for i in range(rank, MICRO_BATCHES, world)])
    return results(loop.preconditioner)


def results(preconditioner):
    return {
        name.removeprefix("net."): [whole(t) for t in (w.orig, w.gamma, w.effective)]
        for name, w in preconditioner.weights.items()
    }


def halves(parameters):
    parameters = [*parameters]
    return [sgd(parameters[i::2]) for i in (0, 1)]


def make_of(step):
    return halves if step == "a skipped optimizer" else sgd


def _on_ranks(rank, wrap, step):
    loop = Loop(make_of(step), wrap=WRAPS[wrap], **SETTINGS)
    return train(loop, STEPS[step], rank, dist.get_world_size())


@pytest.mark.parametrize("wrap, step", CASES, ids=[", ".join(case) for case in CASES])
def test_ranks_train_as_one_process_does(wrap, step):
    in_one = {"synchronised once": accumulate}.get(step, STEPS[step])
    expected = train(Loop(make_of(step), **SETTINGS), in_one)
    for found in run_ranks(2, _on_ranks, wrap, step):
        require_near(found, expected)


def alone(make=sgd, steps=3):
    return train(Loop(make, **SETTINGS), accumulate, steps=steps)


# --- DDP


def _share(rank, given):
    """Counts of the weights that this rank computed, and the results; `given`: what pc.precondition gets."""
    computed = {"evaluate": 0, "pull_back": 0}
    for name in computed:

        def counted(split, orig, *rest, function=getattr(WeightSplit, name), name=name, **options):
            computed[name] += len(orig)
            return function(split, orig, *rest, **options)

        setattr(WeightSplit, name, counted)
    loop = Loop.__new__(Loop)
    model = pc.attach(toy_model(), CONFIG)
    loop.model, loop.follows, loop.optimizers = DDP(model), True, [sgd(model.parameters())]
    if given == "DDP with a hook":
        loop.model.register_comm_hook(None, allreduce_hook)
    loop.preconditioner = pc.precondition(
        loop.model if "DDP" in given else model,
        loop.optimizer,
        process_group=dist.group.WORLD if given == "group" else None,
    )
    found = train(loop, accumulate, rank, dist.get_world_size())
    if rank == 0:  # one rank may write alone
        loop.preconditioner.write_pc()
        pc.merge(model)
    return computed, found


@pytest.mark.parametrize("given", ["DDP", "group", "model", "DDP with a hook"])
def test_ranks_of_ddp_share_the_work(given):
    """In each step and at the start, one rank computes each of eight matrices; without a group every rank does, and with a
    hook, because one for local SGD leaves ranks their own gradients."""
    expected, extra = alone(), 8  # by the last write_pc, on rank 0 alone
    found = run_ranks(2, _share, given)
    pulled = [computed["pull_back"] for computed, _ in found]
    written = [computed["evaluate"] - extra * (rank == 0) for rank, (computed, _) in enumerate(found)]
    part = 1 if given in ("model", "DDP with a hook") else 2
    assert pulled == [3 * 8 // part] * 2 and written == [4 * 8 // part] * 2
    for _, result in found:
        require_near(result, expected)
        require_near(result, found[0][1], 0.0)


def _join(rank, throw):
    """Rank 1 has fewer batches; afterwards all ranks have the weights of the rank that trained longest."""
    loop = Loop(lambda p: torch.optim.SGD(p, lr=0.05), wrap=DDP, **SETTINGS)
    with Join([loop.model], throw_on_early_termination=throw):
        for step in range(3 - rank):
            loop.step(10 * step + rank)
    loop.step(rank)
    require_pc(loop.preconditioner)
    return results(loop.preconditioner)


def test_ranks_with_fewer_batches():
    one, other = run_ranks(2, _join, False, timeout=60)
    require_near(one, other, 0.0)
    with pytest.raises(AssertionError, match="exhausted"):
        run_ranks(2, _join, True, timeout=60)


def _after(rank, wrap):
    """The error if DDP or FSDP comes after the preconditioner."""
    loop = Loop(sgd, **SETTINGS)
    with pytest.raises(UserError) as raised:
        loop.model = WRAPS[wrap](loop.model)
        loop.step()
    return str(raised.value)


@pytest.mark.parametrize(
    "wrap, said",
    [
        ("DDP", "DDP cannot wrap a model after pc.precondition: call pc.precondition(ddp, optimizer) after it"),
        ("FSDP2", "call it after DDP and fully_shard"),
    ],
)
def test_wrapping_after_precondition_is_refused(wrap, said):
    assert said in run_ranks(1, _after, wrap)[0]


def _copies(rank):
    """A copy, an average and a pickle of `ddp.module` are evaluated, merged, and wrapped again."""
    loop = Loop(sgd, wrap=DDP, **SETTINGS)
    loop.step()
    module, x = loop.model.module, toy_batch(0)
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    for copied in (copy.deepcopy(module), average.module, pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x), module(x))
        DDP(pc.merge(copied))(x)


def test_copies_of_what_ddp_wraps():
    run_ranks(1, _copies)


def _fsdp1(rank):
    model = FullyShardedDataParallel(
        pc.attach(toy_model(), CONFIG), use_orig_params=True, device_id=torch.device("cpu")
    )
    with pytest.raises(UserError, match="FSDP1 makes weights parts of one flat parameter; shard with fully_shard"):
        pc.precondition(model, sgd(model.parameters()))


def test_fsdp1_is_refused():
    run_ranks(1, _fsdp1)


# --- FSDP2's gathered and empty shards


def _written_while_gathered(rank, write):
    """Whether each layer has PC(W), although FSDP held weights that an earlier forward pass gathered."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(pc.attach(toy_model(), CONFIG), mesh=mesh, reshard_after_forward=False)
    preconditioner = pc.precondition(model)
    with torch.no_grad():
        model(toy_batch(0))
        for weight in preconditioner.weights.values():
            weight.orig.mul_(2.0)
    getattr(preconditioner, write)()
    parameters, expected = dict(model.named_parameters()), expected_pc(preconditioner)
    return [(whole(parameters[f"{name}.weight"]) - expected[name]).abs().max() < 1e-12 for name in expected]


@pytest.mark.fast
@pytest.mark.parametrize("write", ["write_pc", "restart"])
def test_pc_replaces_gathered_weights(write):
    for same in run_ranks(2, partial(_written_while_gathered, write=write)):
        assert same and all(same)


def _more_ranks_than_rows(rank):
    model = sharded(pc.attach(toy_model(d=2, f=3), CONFIG))
    preconditioner = pc.precondition(model)
    toy_loss(model, toy_batch(0, d=2)).backward()
    preconditioner.pull_back()
    return {name: [whole(w.orig.grad), whole(w.gamma.grad)] for name, w in preconditioner.weights.items()}


@pytest.mark.fast
def test_empty_shards():
    """Seven of ten tensors have no rows on some of four ranks; gamma is on one only."""
    model = toy_model(d=2, f=3)
    layers = put_in_graph(model, CONFIG)
    toy_loss(model, toy_batch(0, d=2)).backward()
    expected = {name: [layer.weight.grad, layer.gamma.grad] for name, layer in layers.items()}
    for found in run_ranks(4, _more_ranks_than_rows):
        require_near(found, expected)


# --- states


def _from_meta(rank, how):
    """A start from full plain weights, training, and a resume from states of torch's distributed checkpoints."""
    given = toy_model().state_dict()
    whole_states = StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "broadcast")

    def make(load_plain):
        with torch.device("meta"):
            model = nn.Sequential(*(ToyBlock(7, 10) for _ in range(2))).double()
        sharded(pc.attach(model, CONFIG))
        if not load_plain:
            model.to_empty(device="cpu")
        elif how == "broadcast":
            set_model_state_dict(model, given if rank == 0 else {}, options=whole_states)
        else:
            shards = {
                name: distribute_tensor(given[name], p.device_mesh, p.placements)
                for name, p in model.named_parameters()
            }
            model.load_state_dict(shards, assign=True)
        loop = Loop.__new__(Loop)
        loop.model, loop.follows, loop.optimizers = model, True, [adamw(model.parameters())]
        loop.preconditioner = pc.precondition(model, loop.optimizer)
        return loop

    loop = make(load_plain=True)
    found = train(loop, accumulate, rank, 2, steps=1)
    whole = StateDictOptions(full_state_dict=True)
    saved = [
        get_model_state_dict(loop.model, options=whole),
        get_optimizer_state_dict(loop.model, loop.optimizer, options=whole),
    ]
    saved = copy.deepcopy([None if rank and how == "broadcast" else state for state in saved])
    straight = train(loop, accumulate, rank, 2, steps=2)
    loop = make(load_plain=False)
    set_model_state_dict(loop.model, saved[0] or {}, options=whole_states)
    set_optimizer_state_dict(loop.model, loop.optimizer, saved[1] or {}, options=whole_states)
    return found, straight, train(loop, accumulate, rank, 2, steps=2)


@pytest.mark.parametrize("how", ["broadcast", "assign"])
def test_fsdp2_from_meta(how):
    """FSDP2's standard start; the resume has the moments of gammas too."""
    expected = alone(adamw, steps=1)
    for found, straight, resumed in run_ranks(2, _from_meta, how):
        require_near(found, expected, 1e-9)  # AdamW divides by root mean squares near zero
        require_near(resumed, straight, 0.0)
    assert (straight["0.attention.wo"][1] - found["0.attention.wo"][1]).abs() > 1e-3  # control: gamma moves


def _whole_state(rank, wrap, state):
    """Whole states and results after a step, which starts from `state`, of another kind of model, if it is given."""
    options = StateDictOptions(full_state_dict=True)
    loop = Loop(adamw, seed=5 if state else 0, wrap=WRAPS.get(wrap, lambda model: model), **SETTINGS)
    loop.step(9)  # so that its optimizer has a state
    if state:
        model, optimizer = copy.deepcopy(state)  # the arguments are in shared memory
        set_model_state_dict(loop.model, model, options=options)
        set_optimizer_state_dict(loop.model, loop.optimizer, optimizer, options=options)
    loop.step(3)
    states = [get_model_state_dict(loop.model, options=options)]
    return [*states, get_optimizer_state_dict(loop.model, loop.optimizer, options=options)], results(
        loop.preconditioner
    )


@pytest.mark.parametrize("source, ranks", [("FSDP2", 2), ("DDP", 2), ("one process", 1)])
def test_whole_states_load_into_any_kind_of_model(source, ranks):
    """On another number of ranks too; training continues with the same W, gamma, moments and vectors."""
    saved, _ = run_ranks(ranks, _whole_state, source, None)[0]
    assert {name.rpartition("wo.")[2] for name in saved[0] if "wo." in name} == {
        "weight", "weight_orig", "weight_gamma", "weight_u", "weight_v",
    }  # fmt: skip
    _, expected = run_ranks(1, _whole_state, "one process", saved)[0]
    for wrap, others in (("FSDP2", 3), ("DDP", 2)):
        for _, found in run_ranks(others, _whole_state, wrap, saved):
            require_near(found, expected, 1e-9)


# --- ranks that differ


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
    """One expert on each rank; the experts have their own optimizer (`lr` 0), or their own group in a common one."""
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
    before = whole(preconditioner.weights["dense"].u)
    model(torch.randn(5, 6)).square().mean().backward()
    preconditioner.pull_back()
    for optimizer in optimizers:
        optimizer.step()
    assert not torch.equal(before, whole(preconditioner.weights["dense"].u))  # PC(W) is written
    model(torch.randn(5, 6))
    return [whole(preconditioner.weights["experts"].gamma)]


@pytest.mark.parametrize("lr", [0.0, 1e-2])
def test_a_rank_without_gradients_goes_on_as_the_others(lr):
    """Also in a first step at rate 0, as in Hugging Face's schedules, which looks like a step that only creates state."""
    (first,), (second,) = run_ranks(2, _without_tokens, lr)
    assert torch.equal(first, second) and (first[0] == 1.0) == (lr == 0.0)


def _asks_alone(rank):
    """Only rank 0 asks for its optimizer's state before the first step, as where it alone saves."""
    loop = Loop(sgd, wrap=DDP, **SETTINGS)
    if rank == 0:
        get_optimizer_state_dict(loop.model.module, loop.optimizer)
    loop.step(rank)
    return results(loop.preconditioner)


def test_one_replica_may_ask_for_the_state_alone():
    require_near(*run_ranks(2, _asks_alone), tolerance=0.0)


def in_one_unit(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _evaluates_between_steps(_rank, wrap):
    loop = Loop(one_for_each_block, wrap=wrap, **SETTINGS)
    loop.backward()
    loop.pull_back()
    loop.optimizers[0].step()
    return {"output": [loop.model(toy_batch(0)).detach()]}


def test_shards_that_are_read_between_the_steps_of_two_optimizers_are_of_pc():
    """It is written before FSDP gathers the weights for the forward pass."""
    expected = _evaluates_between_steps(0, lambda model: model)
    for found in run_ranks(2, _evaluates_between_steps, in_one_unit):
        require_near(found, expected)


def _zero(rank):
    """PC must come first: ZeRO's optimizer divides its parameters once, and would not see a W or gamma that comes later."""
    model = DDP(pc.attach(toy_model(), CONFIG))

    def make():
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)

    with pytest.raises(UserError, match="ZeroRedundancyOptimizer"):
        pc.precondition(model, make())
    loop = Loop.__new__(Loop)
    loop.model, loop.preconditioner, loop.follows = model, pc.precondition(model), True
    loop.optimizers = [make()]
    loop.preconditioner.follow(loop.optimizer)
    return train(loop, accumulate, rank, 2)


def test_zero_redundancy_optimizer():
    for found in run_ranks(2, _zero):
        require_near(found, alone())


# --- the paper's layer


def _in_graph(rank):
    """Under FSDP2, compiled: W and gamma after some steps."""
    model = toy_model()
    layers = put_in_graph(model, CONFIG)
    loop = InGraph.__new__(InGraph)
    loop.model, loop.layers = sharded(model), layers
    loop.optimizers = [sgd(model.parameters())]
    for layer in layers.values():
        layer.compile(backend="aot_eager")
    loop.scale = 2 / MICRO_BATCHES
    for step in range(3):
        accumulate(loop, [100 * step + i for i in range(rank, MICRO_BATCHES, 2)])
    return loop.trained()


def test_the_papers_layer_under_fsdp2():
    assert issubclass(PCLinear, nn.Linear)
    expected = {name: tuple(tensors[:2]) for name, tensors in alone().items()}
    for found in run_ranks(2, _in_graph):
        require_near(found, expected)
