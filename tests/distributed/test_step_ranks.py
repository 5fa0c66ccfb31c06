"""Wrapped and sharded models against one process, in float64 on gloo."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pc
from helpers.ranks import run_ranks
from helpers.toy import toy_batch, toy_loss, toy_model
from pc import PCConfig
from pc.layer import put_in_graph

BATCHES = 4  # micro-batches of one step over all ranks
CASES = {
    "DDP": ("ddp", torch.optim.SGD),
    "FSDP2": ("fsdp2", torch.optim.SGD),
    # whose steps of many tensors at once leave a DTensor's version counter as it is
    "FSDP2, AdamW": ("fsdp2", torch.optim.AdamW),
}
CONFIG = PCConfig(level={"o": 2, "ffn": 4})


def _model(**sizes):
    return pc.attach(toy_model(**sizes), CONFIG)


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
    """The model's state after three steps on this rank's micro-batches."""
    optimizer = make(model.parameters(), lr=0.05)
    preconditioner = pc.precondition(trained or model, optimizer)
    for step in range(3):
        for i in range(rank, BATCHES, world):
            (toy_loss(trained or model, toy_batch(100 * step + i)) / parts).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # leaves unsharded parameters, which must not affect the next steps
            model(toy_batch(0))
    return {name: _full(tensor) for name, tensor in model.state_dict().items()}


def _train_wrapped(rank, wrapper, make):
    model = _model()
    if wrapper == "ddp":  # averages over its two ranks; the shards are summed
        return _train(model, make, rank, 2, BATCHES / 2, DistributedDataParallel(model))
    return _train(_shard(model, _mesh()), make, rank, 2)


@pytest.mark.parametrize("wrapper, make", CASES.values(), ids=CASES)
def test_wrapped_models_are_followed(wrapper, make):
    expected = _train(_model(), make)
    # AdamW divides by root mean squares near zero, which amplifies rounding
    tolerance = 1e-8 if make is torch.optim.AdamW else 1e-12
    for state in run_ranks(2, _train_wrapped, wrapper, make):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=tolerance, msg=name)
    assert (
        expected["0.attention.wo.weight_orig"] - toy_model()[0].attention["wo"].weight
    ).abs().max() > 1e-3  # control


def _written_while_gathered(rank):
    """Whether each layer has PC(W), where a forward pass had left FSDP holding gathered weights."""
    model = fully_shard(_model(), mesh=_mesh(), reshard_after_forward=False)
    preconditioner = pc.precondition(model)
    with torch.no_grad():
        toy_loss(model, toy_batch(0))
        for weight in preconditioner.weights.values():
            weight.orig.mul_(2.0)
    preconditioner.write_pc()
    parameters = dict(model.named_parameters())
    return [
        (_full(parameters[f"{name}.weight"]) - pc.effective_weight(*map(_full, tensors), w.config)).abs().max() < 1e-12
        for name, w in preconditioner.weights.items()
        for tensors in [(w.orig, w.gamma, w.u, w.v)]
    ]


@pytest.mark.fast
def test_pc_replaces_gathered_weights():
    for same in run_ranks(2, _written_while_gathered):
        assert same and all(same)


def _more_ranks_than_rows(rank):
    model = _shard(_model(d=2, f=3), _mesh(4))
    preconditioner = pc.precondition(model)
    toy_loss(model, toy_batch(0, d=2)).backward()
    preconditioner.pull_back()
    return {name: [_full(p.grad) / 4 for p in (w.orig, w.gamma)] for name, w in preconditioner.weights.items()}


@pytest.mark.fast
def test_empty_shards():
    """Seven of ten tensors have no rows on some of four ranks; gamma is on one only."""
    reference = toy_model(d=2, f=3)
    layers = put_in_graph(reference, CONFIG)
    toy_loss(reference, toy_batch(0, d=2)).backward()
    for gradients in run_ranks(4, _more_ranks_than_rows):
        for name, layer in layers.items():
            for found, parameter in zip(gradients[name], (layer.weight, layer.gamma), strict=True):
                torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-12, msg=name)
