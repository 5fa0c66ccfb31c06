"""Which optimizer and group a gamma joins, and Muon's groups and plans, which are of several matrices too."""

import pytest
import torch
from torch import nn

import pc
from helpers.toy import Loop, ToyBlock, same, toy_batch, toy_loss, toy_model
from pc import MatrixSplit, PCConfig, UserError
from pc.owner import RecentPlans


def test_a_gamma_is_trained_as_other_vectors_are():
    """Whether the optimizer was made before or after attach, or from a filter: it is one parameter of one dimension."""
    model = nn.Sequential(ToyBlock(7, 10), nn.LayerNorm(7)).double()
    matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    preconditioner = pc.precondition(pc.attach(model, PCConfig()), optimizer)
    gammas = [w.gamma for w in preconditioner.weights.values()]
    assert [id(p) for p in optimizer.param_groups[1]["params"][2:]] == [id(gamma) for gamma in gammas]
    toy_loss(model, toy_batch(0)).backward()
    preconditioner.pull_back()
    optimizer.step()
    assert all((gamma - 1).abs() > 1e-4 for gamma in gammas)  # AdamW's first step is the learning rate, 1e-3


def test_without_vectors_a_gamma_joins_the_group_of_its_weight():
    model = toy_model()
    optimizer = torch.optim.AdamW(
        [{"params": block.parameters(), "lr": 0.1 / (i + 1)} for i, block in enumerate(model)]
    )
    preconditioner = pc.precondition(pc.attach(model, PCConfig()), optimizer)
    for group in optimizer.param_groups:
        weights = [w for w in preconditioner.weights.values() if any(p is w.orig for p in group["params"])]
        assert {id(w.gamma) for w in weights} == {id(p) for p in group["params"] if p.ndim == 1} and weights


def test_a_gamma_stays_with_the_optimizer_of_its_weight():
    """Also where the vectors of another come first, as of a generator and its critic."""
    models = [nn.Sequential(ToyBlock(7, 10), nn.LayerNorm(7)).double() for _ in range(2)]
    both = nn.ModuleDict({"generator": models[0], "critic": models[1]})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    preconditioner = pc.precondition(pc.attach(both, PCConfig()), *optimizers)
    for weight in preconditioner.weights.values():
        index = weight.name.startswith("critic")
        assert any(p is weight.gamma for p in optimizers[index].param_groups[0]["params"])


def test_a_gamma_has_the_rate_of_its_weight():
    """Of two layers with a rate each, both with vectors; the decay of neither keeps it out of its group."""
    layers = [nn.Sequential(ToyBlock(7, 10), nn.LayerNorm(7)).double() for _ in range(2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD([{"params": x.parameters(), "lr": 10.0**-i} for i, x in enumerate(layers)])
    preconditioner = pc.precondition(pc.attach(model, PCConfig()), optimizer)
    for weight in preconditioner.weights.values():
        group = optimizer.param_groups[int(weight.name[0])]
        assert any(p is weight.gamma for p in group["params"])


def test_a_gamma_has_the_rate_of_its_weight_in_a_warm_up_from_zero():
    """A schedule that was made first has set all rates to 0."""
    model = nn.Sequential(ToyBlock(7, 10), nn.LayerNorm(7)).double()
    groups = [{"params": model[1].parameters(), "lr": 1e-4}, {"params": model[0].parameters(), "lr": 1e-2}]
    optimizer = torch.optim.SGD(groups)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    pc.precondition(pc.attach(model, PCConfig()), optimizer)
    assert [sum(p.ndim == 1 for p in group["params"]) for group in optimizer.param_groups] == [2, 4]


def test_gammas_of_muons_groups_join_the_others():
    """Of an optimizer that has both kinds, by a key of the group."""
    model = nn.Sequential(ToyBlock(7, 10), nn.LayerNorm(7)).double()
    groups = [{"params": model[0].parameters(), "use_muon": True}, {"params": model[1].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    pc.precondition(pc.attach(model, PCConfig()), optimizer)
    assert [sum(p.ndim == 1 for p in group["params"]) for group in optimizer.param_groups] == [0, 6]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 12, 6))

    def forward(self, x):
        return torch.einsum("eoi,bi->beo", self.gate_up, x)


EXPERTS = PCConfig(blocks=("ffn",), splits={"gate_up": MatrixSplit(("gate", "up"))})


def test_gammas_of_a_stack_are_no_matrix():
    """So that Muon and weight decay, which people choose by `ndim`, leave them alone."""
    model = pc.attach(Experts(), EXPERTS)
    preconditioner = pc.precondition(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [[*p.shape] for name, p in model.named_parameters() if "gamma" in name] == [[6]]
    model(torch.randn(5, 6)).square().mean().backward()
    preconditioner.pull_back()
    assert preconditioner.weights["gate_up"].gamma.grad.shape == (6,)


def test_a_group_with_a_split_joins_muon_later():
    """Of weights that are stacks of two matrices, as if it had been given at first."""
    states = []
    for late in (False, True):
        torch.manual_seed(0)
        first, experts = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((4, 6), (3, 8, 6)))
        group = {"params": [experts], "split": MatrixSplit(("gate", "up"))}
        optimizer = pc.Muon([{"params": [first]}, *([] if late else [group])], lr=0.1)
        if late:
            optimizer.add_param_group(group)
        for parameter in (first, experts):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        states.append([first, experts])
    assert same(*states)
    with pytest.raises(ValueError, match="Muon needs matrices"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_plans_of_changing_sets_of_weights_do_not_pile_up():
    """As of experts without tokens: each step has gradients of another set. The results are those of whole plans."""
    loop, other = Loop(), Loop()
    for step in range(2 * RecentPlans.LIMIT):
        for one in (loop, other):
            one.backward(step)
            weights = [*one.preconditioner.weights.values()]
            for index, weight in enumerate(weights):
                if step >> index & 1 and index < len(weights) - 1:
                    weight.effective.grad = None
            one.preconditioner.pull_back()
            one.optimizer.step()
            one.optimizer.zero_grad()
            if one is other:
                one.preconditioner._plans = RecentPlans()  # all made anew
    assert len(loop.preconditioner._plans._plans) == RecentPlans.LIMIT
    assert same(loop.model.state_dict(), other.model.state_dict())


def test_muon_alone_cannot_train_gammas():
    model = pc.attach(Experts(), EXPERTS)
    with pytest.raises(UserError, match="train matrices alone; give one for vectors too"):
        pc.precondition(model, pc.Muon([{"params": model.parameters(), "split": MatrixSplit(("gate", "up"))}], lr=0.1))
