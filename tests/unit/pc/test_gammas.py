"""Which optimizer and group a gamma joins; Muon's groups and plans for weights of several matrices."""

import pytest
import torch
from torch import nn

import pc
from helpers.toy import Loop, ToyBlock, same, toy_model
from pc import MatrixSplit, PCConfig, UserError
from pc.owner import RecentPlans


def normed():
    return nn.Sequential(ToyBlock(7, 10), nn.LayerNorm(7)).double()


def two_normed():
    return nn.Sequential(normed(), normed())


def by_dimension(model):
    matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    return [torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])]


def by_part(model):
    """A group with its own rate for each part."""
    return [torch.optim.SGD([{"params": part.parameters(), "lr": 10.0**-i} for i, part in enumerate(model)])]


def warming_up(model):
    """A schedule that was made before PC has set all rates to 0."""
    (optimizer,) = by_part(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    return [optimizer]


class ByAlgorithm(torch.optim.SGD):
    """Groups with an `algorithm` are for matrices alone, as dion's; GaLore's have a `rank`, muon-optimizer's `use_muon`."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert "algorithm" not in group or all(p.ndim == 2 for p in group["params"]), "only supports matrices"
        return super().step(closure)


def by_algorithm(model):
    groups = [{"params": model[0].parameters(), "algorithm": "muon"}, {"params": model[1].parameters(), "lr": 1e-4}]
    return [ByAlgorithm(groups, lr=0.1)]


def by_kind(model):
    """One optimizer for matrices, another for vectors."""
    matrices, vectors = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    return [torch.optim.SGD(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=3e-4)]


# a model, its optimizers, and the index, among all groups, of the one that a weight's gamma joins
GROUPS = {
    "that of other vectors": (normed, by_dimension, lambda name: 1),
    "without vectors that of its weight": (toy_model, by_part, lambda name: int(name[0])),
    "that with the rate of its weight": (two_normed, by_part, lambda name: int(name[0])),
    "also in a warm-up from zero": (two_normed, warming_up, lambda name: int(name[0])),
    "of the optimizer of its weight": (
        two_normed,
        lambda model: [torch.optim.SGD(part.parameters(), lr=0.1) for part in model],
        lambda name: int(name[0]),
    ),
    "none that may be for matrices alone": (normed, by_algorithm, lambda name: 1),
    "of another optimizer, if its weight's has no vectors": (normed, by_kind, lambda name: 1),
}


@pytest.mark.parametrize("make, make_optimizers, group_of", GROUPS.values(), ids=GROUPS)
def test_the_group_that_a_gamma_joins(make, make_optimizers, group_of):
    model = make()
    optimizers = make_optimizers(model)
    preconditioner = pc.precondition(pc.attach(model), *optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name, weight in preconditioner.weights.items():
        assert [i for i, g in enumerate(groups) if any(p is weight.gamma for p in g["params"])] == [group_of(name)]
    model(torch.randn(4, 7).double()).sum().backward()
    preconditioner.pull_back()
    for optimizer in optimizers:
        optimizer.step()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 12, 6))


EXPERTS = PCConfig(blocks=("ffn",), splits={"gate_up": MatrixSplit(("gate", "up"))})


def test_gammas_of_a_stack_are_a_vector():
    """So that Muon and weight decay, which are often chosen by `ndim`, leave them alone."""
    model = pc.attach(Experts(), EXPERTS)
    pc.precondition(model)
    assert [[*p.shape] for name, p in model.named_parameters() if "gamma" in name] == [[6]]


def test_a_group_with_a_split_joins_muon_later():
    """The group has stacks of two matrices. The result is as if it had been there from the start."""
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
    """As with experts that get no tokens: gradients exist for other weights in each step. Cached plans give the same
    as new ones."""
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
                one.preconditioner._step._plans = RecentPlans()  # made anew in each step
    assert len(loop.preconditioner._step._plans._plans) == RecentPlans.LIMIT
    assert same(loop.model.state_dict(), other.model.state_dict())


def test_muon_alone_cannot_train_gammas():
    model = pc.attach(Experts(), EXPERTS)
    with pytest.raises(UserError, match="train matrices alone; give one for vectors too"):
        pc.precondition(model, pc.Muon([{"params": model.parameters(), "split": MatrixSplit(("gate", "up"))}], lr=0.1))
