"""Schedule "step" on sharded models against the unsharded in-graph reference, on gloo."""

import functools
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pc
from helpers.ranks import run_ranks
from helpers.toy import toy_batch, toy_loss, toy_model
from pc import PCConfig, owner
from pc import step as step_schedule

BATCHES = 12  # micro-batches of one step over all ranks: divides by 1, 2, 3 and 4
TOLERANCE = 1e-12  # float64 sums in another order


def _config(schedule, level=4):
    return PCConfig(level=level, blocks=("o", "ffn"), schedule=schedule)


def _full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _loop(model, steps, rank=0, world=1, make=torch.optim.SGD, parts=BATCHES, trained=None):
    """The gradients of the first step, and the schedule, after `steps` on this rank's micro-batches."""
    optimizer = make(model.parameters(), lr=0.05)
    schedule = pc.schedule(model, optimizer)
    first = None
    for step in range(steps):
        for i in range(rank, BATCHES, world):
            (toy_loss(trained or model, toy_batch(100 * step + i)) / parts).backward()
        schedule.pull_back()
        first = first or {name: _full(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # leaves unsharded parameters, which must not affect the next steps
            model(toy_batch(0))
    return first, schedule


def _reference(level, steps):
    """Gradients of the first step and parameters after `steps` of SGD, unsharded and in-graph."""
    model = pc.attach(toy_model(), _config("forward", level))
    first, _ = _loop(model, steps)
    return first, {name: _full(p) for name, p in model.named_parameters()}


def _shard(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _train(rank, shape, level, steps):
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    world = mesh.size()
    model = _shard(pc.attach(toy_model(), _config("step", level)), mesh)
    first, schedule = _loop(model, steps, rank, world)
    raw = {f"{name}.weight": _full(state.raw) for name, state in schedule.weights.items()}
    return first, {name: _full(p) for name, p in model.named_parameters()} | raw


def _train_as_on_a_gpu(rank, shape, level, steps):
    """With batches of matrices, as on a GPU; a CPU takes them one by one."""
    in_batches = functools.partial(owner.Plan, batch_bytes=owner.BUCKET_BYTES)
    with mock.patch.object(step_schedule, "Plan", in_batches):
        return _train(rank, shape, level, steps)


@pytest.mark.parametrize(
    "shape, train",
    [((2,), _train), ((2,), _train_as_on_a_gpu), ((3,), _train), ((2, 2), _train_as_on_a_gpu)],
    ids=["fsdp2", "fsdp2, batches", "fsdp3", "hsdp2x2, batches"],
)
def test_training_equals_the_unsharded_reference(shape, train):
    level = {"o": 2, "ffn": 4}  # two levels: several keys on one owner
    expected_first, expected_last = _reference(level, 3)
    ranks = 1
    for size in shape:
        ranks *= size
    for first, last in run_ranks(ranks, train, shape, level, 3):
        for expected, actual in ((expected_first, first), (expected_last, last)):
            assert actual.keys() == expected.keys()
            scale = max(tensor.abs().max() for tensor in expected.values())
            for name, tensor in expected.items():
                assert (actual[name] - tensor).abs().max() / scale < TOLERANCE, name
    # control: another order of the coefficients differs far more
    other, _ = _reference(3, 1)
    assert max((other[n] - expected_first[n]).abs().max() for n in other) > 1e-4


def _train_wrapped(rank, schedule, wrapper, make):
    model = pc.attach(toy_model(), _config(schedule))
    if wrapper == "ddp":  # averages over its two ranks; the shards are summed
        _loop(model, 3, rank, 2, make, BATCHES / 2, torch.nn.parallel.DistributedDataParallel(model))
    else:
        _loop(_shard(model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))), 3, rank, 2, make)
    return {name: _full(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("schedule, wrapper", [("step", "ddp"), ("forward", "ddp"), ("forward", "fsdp2")])
def test_wrapped_models_are_followed(schedule, wrapper):
    """A plain loop; with AdamW, whose steps of many tensors at once leave a DTensor's version counter as it is."""
    make = torch.optim.AdamW if wrapper == "fsdp2" else torch.optim.SGD
    model = pc.attach(toy_model(), _config(schedule))
    _loop(model, 3, make=make)
    # AdamW divides by root mean squares near zero, which amplifies rounding
    tolerance = 1e-8 if make is torch.optim.AdamW else TOLERANCE
    for state in run_ranks(2, _train_wrapped, schedule, wrapper, make):
        assert state.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=tolerance, msg=name)


def _preserved(rank):
    model = _shard(pc.attach(toy_model(), _config("step")), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    schedule = pc.schedule(model)
    pc.preserve(model)
    schedule.materialise()
    return {name: _full(tensor) for name, tensor in model.state_dict().items()}


def test_sharded_weights_come_back_from_a_preserving_start():
    for state in run_ranks(2, _preserved):
        for name, tensor in toy_model().state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6, msg=name)  # an epsilon of 1e-7


def _restored_while_gathered(rank):
    """Whether each layer has its W back, where a forward pass left FSDP holding gathered weights."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = fully_shard(pc.attach(toy_model(), _config("step")), mesh=mesh, reshard_after_forward=False)
    schedule = pc.schedule(model)
    schedule.materialise()
    toy_loss(model, toy_batch(0)).backward()
    schedule.pull_back()
    with torch.no_grad():
        toy_loss(model, toy_batch(0))
    schedule.restore_raw()
    return [
        torch.equal(_full(weight.parameter), _full(schedule.weights[name].raw))
        for name, weight in pc.named_weights(model)
    ]


def test_raw_weights_replace_gathered_ones():
    for same in run_ranks(2, _restored_while_gathered):
        assert same and all(same)


def _equal_layout(rank, copies):
    results = [_train(rank, (2,), 4, 2)[1] for _ in range(copies)]
    return all(torch.equal(results[0][name], result[name]) for result in results for name in result)


def test_bitwise_repeatable_on_an_equal_layout():
    assert all(run_ranks(2, _equal_layout, 2))


def _more_ranks_than_rows(rank):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    model = _shard(pc.attach(toy_model(d=2, f=3), _config("step")), mesh)
    schedule = pc.schedule(model)
    schedule.materialise()
    toy_loss(model, toy_batch(0, d=2)).backward()
    schedule.pull_back()
    return {name: _full(p.grad) / 4 for name, p in model.named_parameters()}


def test_empty_shards():
    """Seven of ten tensors have no rows on some of four ranks; gamma is on one only."""
    reference = pc.attach(toy_model(d=2, f=3), _config("forward"))
    pc.refresh(reference)
    toy_loss(reference, toy_batch(0, d=2)).backward()
    for gradients in run_ranks(4, _more_ranks_than_rows):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
