"""Both schedules on wrapped and sharded models against one process, in float64 on gloo."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pc
from helpers.ranks import run_ranks
from helpers.toy import toy_batch, toy_loss, toy_model
from pc import PCConfig

BATCHES = 4  # micro-batches of one step over all ranks
CASES = {
    "DDP, step": ("step", "ddp", torch.optim.SGD),
    "DDP, forward": ("forward", "ddp", torch.optim.SGD),
    "FSDP2, step": ("step", "fsdp2", torch.optim.SGD),
    # whose steps of many tensors at once leave a DTensor's version counter as it is
    "FSDP2, forward": ("forward", "fsdp2", torch.optim.AdamW),
}


def _model(mode="step", **sizes):
    return pc.attach(toy_model(**sizes), PCConfig(level={"o": 2, "ffn": 4}, mode=mode))


def _full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _mesh(ranks=2):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))


def _shard(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _train(model, make, rank=0, world=1, parts=BATCHES, trained=None):
    """The model's state and W after three steps on this rank's micro-batches."""
    optimizer = make(model.parameters(), lr=0.05)
    preconditioner = pc.precondition(model, optimizer)
    for step in range(3):
        for i in range(rank, BATCHES, world):
            (toy_loss(trained or model, toy_batch(100 * step + i)) / parts).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # leaves unsharded parameters, which must not affect the next steps
            model(toy_batch(0))
    state = model.state_dict() | {f"{name} raw": weight.raw for name, weight in preconditioner.weights.items()}
    return {name: _full(tensor) for name, tensor in state.items()}


def _train_wrapped(rank, mode, wrapper, make):
    model = _model(mode)
    if wrapper == "ddp":  # averages over its two ranks; the shards are summed
        return _train(model, make, rank, 2, BATCHES / 2, DistributedDataParallel(model))
    return _train(_shard(model, _mesh()), make, rank, 2)


@pytest.mark.parametrize("mode, wrapper, make", CASES.values(), ids=CASES)
def test_wrapped_models_are_followed(mode, wrapper, make):
    expected = _train(_model(mode), make)
    # AdamW divides by root mean squares near zero, which amplifies rounding
    tolerance = 1e-8 if make is torch.optim.AdamW else 1e-12
    for state in run_ranks(2, _train_wrapped, mode, wrapper, make):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=tolerance, msg=name)
    assert (expected["0.attention.wo raw"] - toy_model()[0].attention["wo"].weight).abs().max() > 1e-3  # control


def _restored_while_gathered(rank):
    """Whether each layer has its W back, where a forward pass left FSDP holding gathered weights."""
    model = fully_shard(_model(), mesh=_mesh(), reshard_after_forward=False)
    preconditioner = pc.precondition(model)
    preconditioner.write_pc()
    toy_loss(model, toy_batch(0)).backward()
    preconditioner.pull_back()
    with torch.no_grad():
        toy_loss(model, toy_batch(0))
    preconditioner.restore_raw()
    parameters = dict(model.named_parameters())
    return [
        torch.equal(_full(parameters[f"{name}.weight"]), _full(w.raw)) for name, w in preconditioner.weights.items()
    ]


def test_raw_weights_replace_gathered_ones():
    for same in run_ranks(2, _restored_while_gathered):
        assert same and all(same)


def _more_ranks_than_rows(rank):
    model = _shard(_model(d=2, f=3), _mesh(4))
    preconditioner = pc.precondition(model)
    preconditioner.write_pc()
    toy_loss(model, toy_batch(0, d=2)).backward()
    preconditioner.pull_back()
    return {name: _full(p.grad) / 4 for name, p in model.named_parameters()}


def test_empty_shards():
    """Seven of ten tensors have no rows on some of four ranks; gamma is on one only."""
    reference = _model("forward", d=2, f=3)
    pc.refresh(reference)
    toy_loss(reference, toy_batch(0, d=2)).backward()
    for gradients in run_ranks(4, _more_ranks_than_rows):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)


def _change_on_rank_0(rank):
    """What restoring W says on each rank: two linear layers over all ranks, and before them one over half of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = pc.attach(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), PCConfig(blocks=("[012]*",)))
    fully_shard(model[0], mesh=mesh["expert"])
    for layer in (model[1], model[2]):
        fully_shard(layer, mesh=mesh["data", "expert"]._flatten("all"))
    preconditioner = pc.precondition(model)
    preconditioner.write_pc()
    if rank == 0:
        with torch.no_grad():
            model[1].weight.to_local().mul_(2.0)
    try:
        preconditioner.restore_raw()
    except pc.UserError as error:
        return str(error)


def test_a_change_on_one_rank_is_said_on_all():
    """Also if the first weight has another mesh: no rank may wait for one that has raised."""
    for error in run_ranks(4, _change_on_rank_0):
        assert error and "a weight was changed while it held PC(W)" in error


def _without_zero_grad(rank):
    """What a second pull_back says on each rank. A gamma of one element is on one of them alone."""
    model = _shard(_model(), _mesh())
    preconditioner = pc.precondition(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        toy_loss(model, toy_batch(rank)).backward()
        try:
            preconditioner.pull_back()
        except pc.UserError as error:
            return str(error)


def test_gradients_without_zero_grad_are_said_on_all_ranks():
    for error in run_ranks(2, _without_zero_grad, timeout=100.0):
        assert error and "gradients that are already those of W" in error
