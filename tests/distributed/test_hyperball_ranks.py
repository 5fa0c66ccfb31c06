"""AdamH and MuonH, alone and sharded, against the paper's formula for each matrix in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

import pc
from helpers.ranks import run_ranks, sharded, unsharded
from helpers.toy import toy_batch, toy_loss, toy_model
from pc import MatrixSplit, UserError
from pc.optim.hyperball import AdamH, MuonH

# uneven over 2 and 4 ranks, some empty; the last two are stacks: tensor parallelism splits one by matrices, one by rows
SHAPES = [(10, 4), (4, 8), (7, 5), (1, 6), (5, 6, 3), (3, 4, 7)]
MESHES = {"FSDP4": {"fsdp": 4}, "TP2 x FSDP2": {"fsdp": 2, "tp": 2}}
LR, BETAS, ADAM_EPS, MOMENTUM, STEPS = 0.1, (0.9, 0.95), 1e-8, 0.95, 4


def _draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _adam(gradients):
    """Updates of one matrix, one for each gradient."""
    mean = square = torch.zeros_like(gradients[0])
    for step, gradient in enumerate(gradients, 1):
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        yield mean / (1 - BETAS[0] ** step) / ((square / (1 - BETAS[1] ** step)).sqrt() + ADAM_EPS)


def _muon(gradients):
    mean = torch.zeros_like(gradients[0])
    for gradient in gradients:
        mean = mean.lerp(gradient, 1 - MOMENTUM)
        nesterov = gradient.lerp(mean, MOMENTUM)
        update = _zeropower_via_newtonschulz(nesterov, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)
        yield update.double()


def _by_the_formula(updates_of, lr=LR):
    """Every weight after training: W <- R normalize(W - lr R normalize(U))."""
    results = []
    for weight, *gradients in zip(_draw(99), *map(_draw, range(STEPS)), strict=True):
        matrices = []
        for matrix, *of_matrix in zip(*(x.reshape(-1, *x.shape[-2:]) for x in (weight, *gradients)), strict=True):
            radius = matrix.norm()
            for update in updates_of(of_matrix):
                matrix = matrix - lr * radius * update / update.norm()
                matrix = radius * matrix / matrix.norm()
            matrices.append(matrix)
        results.append(torch.stack(matrices).reshape(weight.shape))
    return results


KINDS = {
    "AdamH": (_adam, lambda weights: AdamH(weights, lr=LR, betas=BETAS, eps=ADAM_EPS, weight_decay=0.1)),
    "MuonH": (
        _muon,
        lambda weights: MuonH(
            [{"params": weights[:4]}, {"params": weights[4:], "split": MatrixSplit()}],
            **{"lr": LR, "momentum": MOMENTUM, "weight_decay": 0.1},
        ),
    ),
}


def _train(make, shard):
    weights = shard(_draw(99))
    optimizer = make(weights)
    for step in range(STEPS):
        if step == 2:  # a copy that loads the saved state continues as the original would
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(weights)
            optimizer.load_state_dict(state)
        for weight, gradient in zip(weights, shard(_draw(step)), strict=True):
            weight.grad = gradient.detach()
        optimizer.step()
    return [weight.detach() for weight in weights]


def _on_ranks(rank, name, degrees):
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    return [weight.full_tensor() for weight in _train(KINDS[name][1], lambda tensors: sharded(mesh, tensors))]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("degrees", [None, *MESHES.values()], ids=["alone", *MESHES])
def test_equals_the_formula(name, degrees):
    updates_of, make = KINDS[name]
    runs = run_ranks(4, _on_ranks, name, degrees) if degrees else [_train(make, unsharded)]
    expected, control = _by_the_formula(updates_of), _by_the_formula(updates_of, lr=0.101)
    for weights in runs:
        for found, wanted, other in zip(weights, expected, control, strict=True):
            # rounding of a few float64 operations on numbers near 1
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
            assert (found - other).abs().max() > 1e-4


@pytest.mark.parametrize("make", [AdamH, MuonH])
def test_norms_are_kept(make):
    """In float32, like real weights; a step with a gradient or a rate of zero changes no bit."""
    weight = nn.Parameter(0.02 * torch.randn(48, 32, generator=torch.Generator().manual_seed(0)))
    norm, before = weight.detach().double().norm(), weight.detach().clone()
    optimizer = make([weight], lr=0.0)
    for step in range(500):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        if step == 0:
            optimizer.step()
            assert torch.equal(weight, before)
            optimizer.param_groups[0]["lr"] = 0.02
        optimizer.step()
    assert abs(weight.detach().double().norm() / norm - 1) < 1e-6  # 500 roundings of 6e-8 in 1536 entries
    assert (weight - before).norm() > 0.5 * norm
    unused = nn.Parameter(before.clone())
    unused.grad = torch.zeros_like(unused)
    make([unused], lr=0.02).step()
    assert torch.equal(unused, before)


@pytest.mark.parametrize("make", [AdamH, MuonH])
def test_what_it_cannot_train_is_refused(make):
    stack = nn.Parameter(torch.stack([torch.ones(3, 2), torch.zeros(3, 2)]))
    stack.grad = torch.ones_like(stack)
    group = {"params": [stack]} | ({"split": MatrixSplit()} if make is MuonH else {})
    with pytest.raises(UserError, match=r"\[2, 3, 2\] is zero, so it would never train"):
        make([group]).step()
    with pytest.raises(ValueError, match=r"needs matrices.*, not \[4\]"):
        make([nn.Parameter(torch.ones(4))])

    with pytest.raises(UserError, match="bfloat16 weights; call model.float"):
        make([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))])


def _zero_expert(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    stack, matrix = (nn.Parameter(x) for x in sharded(mesh, [torch.ones(4, 6, 3), torch.ones(6, 4)]))
    with torch.no_grad():
        stack.to_local()[3 - 2 * rank :] = 0.0  # the last expert, which rank 1 has
    stack.grad, matrix.grad = stack.detach().clone(), matrix.detach().clone()
    optimizer = AdamH([stack, matrix], lr=0.0)
    optimizer.step()  # torch's functions for distributed checkpoints take such a step, perhaps before the weights are loaded
    optimizer.param_groups[0]["lr"] = 0.02
    with pytest.raises(UserError, match=r"\[4, 6, 3\] is zero"):
        optimizer.step()
    return True


def test_a_zero_expert_is_refused_on_all_ranks():
    assert run_ranks(2, _zero_expert) == [True, True]


@pytest.mark.parametrize("make", [AdamH, MuonH])
def test_an_interrupted_step_keeps_the_weights(make, monkeypatch):
    weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    weight.grad, before = torch.ones_like(weight), weight.detach().clone()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pc.optim.hyperball.inspect.unwrap", lambda step: interrupted)
    with pytest.raises(KeyboardInterrupt):
        make([weight], lr=0.02).step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("make", [AdamH, MuonH])
def test_with_pc_it_trains_w_and_its_hooks_run_once(make):
    """Also where torch has already wrapped the base class's `step` for hooks. AdamW trains the gammas."""
    torch.optim.Adam([nn.Parameter(torch.ones(1, 1))])
    pc.Muon([nn.Parameter(torch.ones(1, 1))])
    model = pc.attach(toy_model(), pc.PCConfig())
    parameters = [*model.parameters()]
    norms = [p.detach().norm() for p in parameters]
    rest = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer, other = make(parameters, lr=0.1), torch.optim.AdamW([rest])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    with pytest.raises(UserError, match="can train the gamma"):
        pc.precondition(model, optimizer)
    preconditioner = pc.precondition(model, optimizer, other)
    losses = []
    for step in range(5):
        loss = toy_loss(model, toy_batch(0))
        (loss + rest.sum()).backward()
        preconditioner.pull_back()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and calls == ["before"] * 5
    origs = {id(w.effective): w.orig for w in preconditioner.weights.values()}
    for parameter, norm in zip(parameters, norms, strict=True):
        torch.testing.assert_close(origs.get(id(parameter), parameter).norm(), norm, rtol=1e-12, atol=0)
    assert all((weight.gamma != 1).all() for weight in preconditioner.weights.values())
