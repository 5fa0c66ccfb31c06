"""Who moves W: what trains the wrong weights in silence is found by their values, and nothing else is."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pc
from helpers.toy import InGraph, Loop, require_near, require_pc, same, sgd, toy_batch, toy_loss, toy_model
from pc import PCConfig, UserError, watch
from pc.step import Arrival, Stuck, checksums
from pc.weight import Tensors


class OwnList(torch.optim.SGD):
    """Trains the parameters that it got when it was made; a function hides them."""

    views = staticmethod(lambda p: p.detach())

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        own = [self.views(p) for p in self.param_groups[0]["params"]]
        self.own = lambda: own

    @torch.no_grad()
    def step(self, closure=None):
        for p, one in zip(self.param_groups[0]["params"], self.own()):
            if p.grad is not None:
                one.sub_(p.grad, alpha=0.1)


class OwnData(OwnList):
    """Through `.data`, which has version counters of its own."""

    views = staticmethod(lambda p: p.data)


class LeavesOneOut(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.shape != (10, 7):
                p.sub_(p.grad, alpha=0.1)


def train(loop, after=lambda loop: None, steps=watch.LOOKS):
    for step in range(steps):
        loop.step(step)
        after(loop)


def scale_in_data(loop):
    loop.preconditioner.weights["1.attention.wo"].orig.data.mul_(0.99)


def scale_gamma_in_data(loop):
    loop.preconditioner.weights["1.attention.wo"].gamma.data.mul_(0.99)


def replace_data(loop):
    weight = loop.preconditioner.weights["1.attention.wo"].orig
    weight.data = weight.data * 0.99


def fused_without_write(loop):
    """By an optimizer that is not followed; a fused step moves no version counter."""
    train(Loop.__new__(Loop), steps=0)
    weight = loop.preconditioner.weights["1.attention.wo"].orig
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1e-2, fused=True).step()
    weight.grad = None


def without_gammas(make):
    return Loop(lambda p: make(p, lr=0.1), learnable_gamma=False)


def beside_another():
    """The optimizer that steps last moves all that it has."""
    loop = without_gammas(torch.optim.SGD)
    first, *others = [weight.effective for weight in loop.preconditioner.weights.values()]
    loop.optimizers = [OwnData([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]
    loop.preconditioner.follow(*loop.optimizers)
    train(loop)


def after_another():
    """W has moved, by the optimizer before."""
    loop = without_gammas(torch.optim.SGD)
    loop.step()
    loop.optimizers = [OwnData([weight.effective for weight in loop.preconditioner.weights.values()], lr=0.1)]
    loop.preconditioner.follow(loop.optimizer)
    train(loop)


WRONG = {
    "its own list": (
        lambda: train(without_gammas(OwnList), steps=1),
        r"OwnList has moved PC\(W\) of 0.attention.wo, not W",
    ),
    "its own list, by data": (
        lambda: train(without_gammas(OwnData)),
        "OwnData has not moved W of 0.attention.wo in 16 steps",
    ),
    "its own list, after another": (after_another, "OwnData has not moved W of 0.attention.wo in 16 steps"),
    "its own list, beside another": (beside_another, "OwnData has not moved W of 0.attention.wo in 16 steps"),
    "one left out": (lambda: train(without_gammas(LeavesOneOut)), "has not moved W of 0.feed_forward.w1 in 16 steps"),
    "moved after the step": (
        lambda: train(Loop(sgd), scale_in_data, 2),
        "W or gamma of 1.attention.wo was changed after .* wrapper around SGD",
    ),
    "a gamma": (
        lambda: train(Loop(sgd), scale_gamma_in_data, 2),
        "W or gamma of 1.attention.wo was changed after",
    ),
    "replaced after the step": (
        lambda: train(Loop(sgd), replace_data, 2),
        "W or gamma of 1.attention.wo was changed after",
    ),
    "a fused step of another": (
        lambda: train(Loop(sgd), fused_without_write, 2),
        "W or gamma of 1.attention.wo was changed after",
    ),
}


@pytest.mark.parametrize("wrong, said", WRONG.values(), ids=WRONG)
def test_what_trains_other_weights_is_found(wrong, said):
    with pytest.raises(UserError, match=said):
        wrong()


def test_a_gamma_is_named_where_other_weights_have_none():
    models = [nn.ModuleDict({name: nn.Linear(8, 8, bias=False)}) for name in ("without", "with")]
    for model, learnable in zip(models, (False, True), strict=True):
        pc.attach(model, PCConfig(blocks=("*",), learnable_gamma=learnable))
    preconditioner = pc.precondition(models, sgd([p for model in models for p in model.parameters()]))
    preconditioner.weights["with"].gamma.data.mul_(0.99)
    models[1]["with"](torch.ones(8)).sum().backward()
    with pytest.raises(UserError, match="W or gamma of with was changed after"):
        preconditioner.pull_back()


def test_an_optimizer_is_looked_at_in_its_first_steps(monkeypatch):
    looks, should_move = [], watch.should_move
    monkeypatch.setattr(watch, "LOOKS", 3)
    monkeypatch.setattr(watch, "should_move", lambda *given: [looks.append(1), should_move(*given)][1])
    loop = Loop(sgd)
    for wanted in (3, 6):
        train(loop, steps=5)
        assert len(looks) == wanted
        loop.preconditioner.follow(loop.optimizer)


def test_it_is_said_once():
    loop = Loop(sgd)
    with pytest.raises(UserError, match="call preconditioner.write_pc"):
        train(loop, scale_in_data, 2)
    loop.zero_grad()
    loop.preconditioner.write_pc()
    loop.step(1)
    require_pc(loop.preconditioner)


class MovesOnce(torch.optim.SGD):
    def step(self, closure=None):
        if not self.state:
            super().step(closure)


class LeavesOutTheFirst(torch.optim.SGD):
    """As SOAP, which first looks at a gradient."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 1:
            super().step()


def scaled(loop):
    """Losses overflow: fused steps under a gradient scaler do nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for step in range(watch.LOOKS):
        scaler.scale(toy_loss(loop.model, toy_batch(step).float())).backward()
        loop.model[0].attention["wq"].weight.grad.fill_(float("inf"))  # W's gradients are finite
        loop.pull_back()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.zero_grad()


def in_float32(make):
    loop = Loop.__new__(Loop)
    loop.model, loop.follows = pc.attach(toy_model().float(), PCConfig()), True
    loop.optimizers = [make(loop.model.parameters())]
    loop.preconditioner = pc.precondition(loop.model, loop.optimizer)
    return loop


def without_loss(loop):
    for step in range(watch.LOOKS):
        loop.backward(step, scale=0.0)
        loop.pull_back()
        loop.update()


def frozen(loop):
    loop.model[0].requires_grad_(False)
    train(loop)


RIGHT = {
    "rate 0": lambda: train(Loop(lambda p: torch.optim.SGD(p, lr=0.0))),
    "a rate that vanishes": lambda: train(Loop(lambda p: torch.optim.AdamW(p, lr=1e-17))),
    "gradients that vanish": lambda: [loop := Loop(sgd), [loop.backward(0, 1e-20) for _ in range(1)], train(loop)],
    "no loss": lambda: without_loss(Loop(sgd)),
    "some frozen": lambda: frozen(Loop(sgd)),
    "the first step left out": lambda: train(Loop(lambda p: LeavesOutTheFirst(p, lr=0.1))),
    "only the first step taken": lambda: train(Loop(lambda p: MovesOnce(p, lr=0.1, momentum=0.9))),
    "fused steps that a scaler skips": lambda: scaled(in_float32(lambda p: torch.optim.SGD(p, lr=0.1, fused=True))),
    "capturable": lambda: train(Loop(lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False))),
}


@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT)
def test_what_only_moves_little_is_not_found(right, monkeypatch):
    monkeypatch.setattr(Stuck, "LIMIT", 2)
    right()


def test_equal_values_are_no_move():
    """Averages swapped in for an evaluation, through `.data`, and back."""
    loop = Loop(sgd)
    loop.step()
    state = copy.deepcopy(loop.model.state_dict())
    for scale in (0.5, 1.0):
        for name, tensor in loop.model.state_dict().items():
            tensor.data.copy_(state[name] * scale)
    loop.step(1)


def numbers(*weights):
    nothing = torch.zeros(0)
    return checksums([Tensors(None, weight, None, nothing, nothing) for weight in weights])[1][: len(weights)].tolist()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_checksums_of_equal_rows_and_of_nothing(kind):
    equal_rows = torch.tensor([[1.0, 2.0, 4.0]], dtype=kind).repeat(4, 1)
    assert len({*numbers(equal_rows, 2 * equal_rows, -equal_rows, equal_rows[:0])}) == 4
    assert len({*numbers(*(torch.eye(5, dtype=kind) * (1 + i * torch.finfo(kind).eps) for i in range(9)))}) == 9


def test_checksums_of_a_view():
    """A matrix of a stack begins anywhere in its storage; a transposed weight is not contiguous."""
    for stack in (torch.randn(3, 5, 7), torch.randn(3, 4, 6)):
        for weight in (*stack, *stack.mT):
            found, changed = numbers(weight, weight + 1e-6)
            assert found != changed and numbers(weight.clone()) == [found]


def test_an_arrival_is_read_when_it_is_there(monkeypatch):
    """Not before the device says so; a later one cannot overwrite it."""

    class OnDevice(torch.Tensor):
        device = torch.device("cuda")

    class Event:
        is_over = False

        def __init__(self, device):
            assert device.type == "cuda"

        def record(self):
            pass

        def query(self):
            return Event.is_over

    monkeypatch.setattr(torch, "Event", Event)
    arrival, seen = Arrival(), []
    for index in (None, 7, None, None, None):
        conditions = torch.zeros(9, dtype=torch.bool)
        if index is not None:
            conditions[index:] = True
        Event.is_over = len(seen) > 1
        seen.append(arrival.find(conditions.as_subclass(OnDevice)))
    assert seen == [None, None, None, 7, None]


# --- states that do not belong together


def averages(loop, decay=0.5):
    """Written back by the user, all of a model's tensors, as by ema-pytorch's `update_model_with_ema`."""
    first = copy.deepcopy(loop.model.state_dict())
    for step in range(5):
        loop.step(step)
    return {name: decay * first[name] + (1 - decay) * now for name, now in loop.model.state_dict().items()}


def test_averages_written_back_are_not_taken_for_a_state():
    loop = Loop(lambda p: torch.optim.SGD(p, lr=1.0))
    step, asked = loop.preconditioner._step, []
    find, step.find_unwritten = step.find_unwritten, lambda tensors: [asked.append(1), find(tensors)][1]
    loop.model.load_state_dict(averages(loop))
    loop.backward()
    for _ in range(2):
        with pytest.raises(UserError, match="W is newer than"):
            loop.pull_back()
    assert len(asked) == 1  # it waits for the device
    loop.zero_grad()
    loop.preconditioner.write_pc()
    loop.step()
    require_pc(loop.preconditioner)


def test_a_copy_of_averages_starts_from_w():
    loop = Loop(lambda p: torch.optim.SGD(p, lr=1.0))
    average = AveragedModel(loop.model)
    for step in range(5):
        loop.step(step)
        average.update_parameters(loop.model)
    wanted = {name: value.clone() for name, value in average.module.state_dict().items()}
    preconditioner = pc.precondition(average.module, sgd(average.module.parameters()))
    for name, weight in preconditioner.weights.items():
        torch.testing.assert_close(weight.orig.detach(), wanted[f"{name}.weight_orig"], rtol=0, atol=0)
    require_pc(preconditioner)


def test_a_saved_state_stays_as_it_is():
    loop, other = Loop(sgd), Loop(sgd, seed=1)
    loop.step()
    state = copy.deepcopy(loop.model.state_dict())
    other.model.load_state_dict(state)
    other.backward()
    other.pull_back()
    assert same(other.model.state_dict(), state)


# --- schedule-free


class ScheduleFree(torch.optim.SGD):
    """`eval` puts the average in W's place, `train` puts W back, through `.data` as heavyball's; each only in the other mode."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.is_training = True

    def train(self, mode=True):
        if mode == self.is_training:
            return
        self.is_training = mode
        for p in self.param_groups[0]["params"]:
            average = self.state[p].setdefault("average", p.detach().clone() * 0.9)
            p.data.copy_(torch.stack([average, self.state[p].setdefault("own", p.detach().clone())])[int(mode)])

    def eval(self):
        self.train(False)


def test_a_schedule_free_optimizer_in_both_modes():
    """Nothing is called after `eval` and `train`; each exchange advances u and v once, as `refresh` of the paper's layers."""
    loops = [Loop(ScheduleFree), InGraph(ScheduleFree)]
    evaluated = []
    for loop in loops:
        loop.optimizer.train()  # in every step, as trainers do
        loop.step()
        for change in (loop.optimizer.eval, loop.optimizer.train):
            change()
            loop.refresh()
            change()
            evaluated.append(toy_loss(loop.model, toy_batch(1)).detach())
        loop.step(1)
    torch.testing.assert_close(evaluated[:2], evaluated[2:], rtol=0, atol=1e-12)
    assert evaluated[0] != evaluated[1]
    require_near(loops[0].trained(), loops[1].trained())
    require_pc(loops[0].preconditioner)
    loops[0].preconditioner.leave()
    assert loops[0].optimizer.train.__func__ is ScheduleFree.train


class Rewriting(ScheduleFree):
    def train(self, mode=True):
        for p in self.param_groups[0]["params"]:
            p.detach().copy_(p.detach().clone())


def test_an_exchange_of_equal_values():
    """It is no change of W, and hides none that came before it."""
    loop = Loop(Rewriting)
    before = copy.deepcopy(loop.model.state_dict())
    loop.optimizer.train()
    loop.backward()
    loop.pull_back()
    assert same(loop.model.state_dict(), before)  # u and v too
    loop.update()
    loop.model[0].attention["wo"].weight_orig.detach().mul_(2.0)
    loop.optimizer.eval()
    loop.backward()
    with pytest.raises(UserError, match="W is newer than"):
        loop.pull_back()
