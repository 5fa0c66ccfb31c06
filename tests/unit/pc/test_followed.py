"""Optimizers that keep more of their parameters than groups and states: they are followed, or refused with what to do."""

import pytest
import torch
from torch.distributed.optim import PostLocalSGDOptimizer

import pc
from helpers.toy import InGraph, Loop, adamw, require_near, require_pc, same, toy_model
from pc import PCConfig, UserError

LATER = (
    r"call preconditioner = pc.precondition\(model\) first, make it from model.parameters\(\), and call .*write_pc\(\)"
)


class Blocked(torch.optim.Optimizer):
    """Blocks are views, made once; gradients are read from the groups at each step, as in Meta's DistributedShampoo."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.states = [{"blocks": Blocks(group["params"])} for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        for group, state in zip(self.param_groups, self.states, strict=True):
            for p, blocks in zip(group["params"], state["blocks"].of_each, strict=True):
                for block, gradient in zip(blocks, () if p.grad is None else p.grad.split(4)):
                    block.sub_(gradient, alpha=group["lr"])


class Blocks:
    def __init__(self, parameters):
        self.of_each = tuple(p.detach().split(4) for p in parameters)


class Lookahead(torch.optim.Optimizer):
    """Does not call its base class, as torch_optimizer's; it moves weights through `.data` after the inner step."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.steps = optimizer, optimizer.param_groups, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.steps += 1
        for group, slow in zip(self.param_groups, self.slow, strict=self.steps % 2 == 0):
            for p, of_p in zip(group["params"], slow, strict=True):
                if self.steps % 2 == 0:
                    of_p += 0.5 * (p.data - of_p)
                    p.data.copy_(of_p)


def lookahead(parameters):
    return Lookahead(adamw(parameters))


REFUSED = {
    "own views": (Blocked, "Blocked has made its own views of the weights, which are PC"),
    "wrapper": (lookahead, "Lookahead wraps another optimizer and may move W after its step"),
    "averages over ranks": (
        lambda p: PostLocalSGDOptimizer(adamw(p), None),
        "PostLocalSGDOptimizer wraps another optimizer and may move W after its step",
    ),
}


@pytest.mark.parametrize("learnable_gamma", [True, False])
@pytest.mark.parametrize("make, said", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(make, said, learnable_gamma):
    model = pc.attach(toy_model(), PCConfig(learnable_gamma=learnable_gamma))
    before = model.state_dict()
    with pytest.raises(UserError, match=f"{said}.*{LATER}"):
        pc.precondition(model, make(model.parameters()))
    assert same(before, model.state_dict())
    preconditioner = pc.precondition(model)
    with pytest.raises(UserError, match=f"{said}.*{LATER}"):
        preconditioner.follow(make(model.parameters()))


@pytest.mark.parametrize("make", [Blocked, lookahead])
def test_what_cannot_be_followed_trains_by_hand(make):
    loop, reference = Loop(make, follow=False), InGraph(make)
    for step in range(5):
        for one in (loop, reference):
            one.backward(step)
            one.pull_back()
            one.update()
    require_near(loop.trained(), reference.trained())
    require_pc(loop.preconditioner)


class Prepared(torch.optim.AdamW):
    """Looks at the names of its groups when they are added."""

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        assert len(group["param_names"]) == len(group["params"])


class Multiplied(torch.optim.SGD):
    """Multiplies rates by what a parameter says of itself, as optimizers of speed runs do, when it steps."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1 * getattr(p, "lr_mul", 1.0))


def test_w_has_the_attributes_of_the_weight():
    loop = Loop.__new__(Loop)
    loop.model, loop.follows = pc.attach(toy_model(), PCConfig()), True
    loop.model[0].attention["wo"].weight.lr_mul = 0.0
    loop.optimizers = [Multiplied(loop.model.parameters(), lr=0.1)]
    loop.preconditioner = pc.precondition(loop.model, loop.optimizer)
    before = {name: weight.orig.clone() for name, weight in loop.preconditioner.weights.items()}
    loop.step()
    stay = [name for name, weight in loop.preconditioner.weights.items() if torch.equal(weight.orig, before[name])]
    assert stay == ["0.attention.wo"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Prepared])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_names_of_parameters_stay_theirs(kind, prefix):
    """Two groups, with names as a compiled model has them; checkpoints by name then hold what they say."""
    model = pc.attach(toy_model(), PCConfig())
    named = [(f"{prefix}{name}", p) for name, p in model.named_parameters()]
    optimizer = kind([{"params": named[:5]}, {"params": named[5:]}], lr=1e-2)
    given = [[*group["param_names"]] for group in optimizer.param_groups]
    preconditioner = pc.precondition(model, optimizer)
    expected = {f"{prefix}{name}": p for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert expected[name] is p
    preconditioner.leave()
    assert [group["param_names"] for group in optimizer.param_groups] == given


def test_names_of_an_optimizer_that_was_made_later():
    model = pc.attach(toy_model(), PCConfig())
    preconditioner = pc.precondition(model)
    optimizer = torch.optim.AdamW(model.named_parameters())
    preconditioner.follow(optimizer)
    (group,) = optimizer.param_groups
    expected = dict(model.named_parameters())
    assert all(expected[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))
