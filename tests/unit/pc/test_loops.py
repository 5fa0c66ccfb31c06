"""The loops of docs/loops.md in one process: each gives the same as the paper's layers in the graph, or is refused in one
line."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import pc
from helpers.toy import (
    InGraph,
    Loop,
    adamw,
    one_for_each_block,
    require_near,
    require_pc,
    same,
    sgd,
    toy_batch,
    toy_loss,
    toy_model,
    trained,
)
from pc import PCConfig, UserError

# --- loops, as functions of a loop and the batches of a step


def accumulate(loop, batches):
    for batch in batches:
        loop.backward(batch)
    loop.pull_back()
    loop.update()


def pull_back_each(loop, batches):
    for batch in batches:
        loop.backward(batch)
        loop.pull_back()
    loop.update()


def skip(loop, batches):
    """A step skipped for a bad loss, before or after gradients are pulled back; and a step without gradients."""
    for is_pulled_back in (False, True):
        loop.backward(99)
        if is_pulled_back:
            loop.pull_back()
        loop.zero_grad(set_to_none=is_pulled_back)
    for optimizer in loop.optimizers:
        optimizer.step()
    loop.zero_grad()
    accumulate(loop, batches)


def keep_gradients(loop, batches):
    """Without `zero_grad`, gradients add up over steps."""
    for batch in batches:
        loop.backward(batch)
        loop.pull_back()
        for optimizer in loop.optimizers:
            optimizer.step()
        loop.refresh()


def clip(loop, batches):
    for batch in batches:
        loop.backward(batch)
    loop.pull_back()
    nn.utils.clip_grad_norm_([p for p in loop.model.parameters() if p.requires_grad], 0.01)
    loop.update()


def look_around(loop, batches):
    """Evaluate, copy and read states between the calls."""
    for batch in batches:
        loop.backward(batch)
        with torch.inference_mode():
            loop.model.eval()(toy_batch(7))
        copy.deepcopy(loop.model)(toy_batch(7))
        copy.deepcopy([loop.model.state_dict(), *(optimizer.state_dict() for optimizer in loop.optimizers)])
        loop.model.train()
    loop.pull_back()
    get_optimizer_state_dict(loop.model, loop.optimizers)
    loop.update()
    get_optimizer_state_dict(loop.model, loop.optimizers)


def by_closures(loop, batches):
    for optimizer in loop.optimizers:
        calls = itertools.count()

        def closure():
            if next(calls) > 0:  # within the step, W has moved since the first call
                loop.refresh()
            loop.zero_grad()
            return sum(loop.backward(batch) for batch in batches)

        optimizer.step(closure)
    loop.refresh()


def by_clipping_closures(loop, batches):
    def closure():
        loop.zero_grad()
        for batch in batches:
            loop.backward(batch)
        loop.pull_back()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)

    loop.optimizers[0].step(closure)
    loop.refresh()


def by_closures_that_clip_in_groups(loop, batches):
    """As in Lightning, without its callbacks."""

    def closure():
        loop.zero_grad()
        for batch in batches:
            loop.backward(batch)
        for group in loop.optimizers[0].param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.01)

    loop.optimizers[0].step(closure)
    loop.refresh()


def lbfgs(parameters):
    """An optimizer that calls its closure several times in a step."""
    return torch.optim.LBFGS([*parameters], lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def sgd_and_lbfgs(parameters):
    first, second = (optimizer.param_groups[0]["params"] for optimizer in one_for_each_block(parameters))
    return [sgd(first), lbfgs(second)]


class Prepared(torch.optim.SGD):
    """Prepares its parameters in `add_param_group`, as some optimizers of pytorch_optimizer do."""

    def add_param_group(self, group):
        super().add_param_group(group)
        new = self.param_groups[-1]["params"]
        self.buffers = getattr(self, "buffers", {}) | {p: torch.zeros_like(p) for p in new}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.buffers[p].mul_(0.9).add_(p.grad), alpha=group["lr"])


class Clearing(Prepared):
    """Clears gradients at the end of its step, as some implementations of SAM do."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
        self.zero_grad()


LOOPS = {
    "accumulation": (accumulate, sgd),
    "pull back per micro-batch": (pull_back_each, sgd),
    "skipped steps": (skip, sgd),
    "no zero_grad": (keep_gradients, sgd),
    "clipping": (clip, sgd),
    "evaluation, copies and states between": (look_around, sgd),
    "closures": (by_closures, adamw),
    "closures that clip": (by_clipping_closures, sgd),
    "closures that clip groups": (by_closures_that_clip_in_groups, sgd),
    "LBFGS": (by_closures, lbfgs),
    "two optimizers": pytest.param(skip, one_for_each_block, marks=pytest.mark.fast),
    "closures of two optimizers": (by_closures, one_for_each_block),
    "closures of two optimizers, one of them LBFGS": (by_closures, sgd_and_lbfgs),
    "an optimizer with its own add_param_group": (accumulate, lambda p: Prepared(p, lr=0.1)),
    "a step that clears gradients": (accumulate, lambda p: Clearing(p, lr=0.1)),
    "closures of a step that clears gradients": (by_closures, lambda p: Clearing(p, lr=0.1)),
    "no rate": (accumulate, lambda p: torch.optim.SGD([{"params": [*p], "lr": torch.tensor(0.1)}])),
    "foreach": (accumulate, lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True)),
    "fused": (accumulate, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    "a rate of 0 at first": (accumulate, lambda p: [torch.optim.SGD(p, lr=0.0)]),
}


@pytest.mark.parametrize("take_step, make", LOOPS.values(), ids=LOOPS)
def test_a_loop_trains_what_layers_in_the_graph_do(take_step, make):
    loops = [Loop(make), InGraph(make)]
    for loop in loops:
        for step in range(4):
            take_step(loop, [2 * step, 2 * step + 1])
            if step == 0 and loop.optimizers[0].param_groups[0]["lr"] == 0.0:
                loop.optimizers[0].param_groups[0]["lr"] = 0.1
    require_near(*(loop.trained() for loop in loops), tolerance=1e-9)  # AdamW divides by root mean squares near zero
    require_pc(loops[0].preconditioner)
    moved = loops[0].trained()["0.attention.wo"][0] - toy_model()[0].attention["wo"].weight
    assert moved.abs().max() > 1e-3  # control


def test_gradients_in_fixed_places():
    """As a replayed CUDA graph writes them: into the tensors that were the gradients when it was captured."""
    loop, reference = Loop(), InGraph()
    loop.backward(0)
    places = {parameter: parameter.grad for parameter in loop.model.parameters() if parameter.grad is not None}
    for step in range(4):
        if step:
            gradients = torch.autograd.grad(toy_loss(loop.model, toy_batch(step)), [*places])
            for place, gradient in zip(places.values(), gradients, strict=True):
                place.add_(gradient)
            with pytest.raises(UserError, match="was not called after the last backward"):
                loop.optimizer.step()
        loop.preconditioner.pull_back(set_to_none=False)
        torch.nn.utils.clip_grad_norm_(loop.optimizer.param_groups[0]["params"], 1e9)
        loop.optimizer.step()
        loop.zero_grad(set_to_none=False)
        reference.backward(step)
        reference.update()
        require_near(loop.trained(), reference.trained(), tolerance=1e-9)
    assert all(parameter.grad is place for parameter, place in places.items())


@pytest.mark.parametrize("clips", [False, True])
def test_closures_with_gradients_that_stay_allocated(clips):
    """Each call of a closure in one step makes gradients, and none pulls them back."""
    found = []
    for set_to_none in (True, False):
        loop = Loop(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))
        loop.backward()
        loop.preconditioner.pull_back(set_to_none=set_to_none)

        def closure(loop=loop):
            loop.zero_grad()
            loss = loop.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(loop.optimizer.param_groups[0]["params"], 0.01)
            return loss

        for _ in range(2):
            loop.optimizer.step(closure)
            assert all((w.effective.grad is None) is set_to_none for w in loop.preconditioner.weights.values())
        found.append(loop.trained())
        if set_to_none:  # only a closure pulls back by itself
            loop.backward()
            with pytest.raises(UserError, match="was not called after the last backward"):
                torch.nn.utils.clip_grad_norm_(loop.optimizer.param_groups[0]["params"], 0.01)
    require_near(*found)


def test_a_graph_that_lost_its_gradients_is_told_of_fixed_places():
    loop = Loop()
    loop.backward(0)
    places = [(p, p.grad) for p in loop.model.parameters() if p.grad is not None]
    loop.pull_back()
    loop.update()
    for _, place in places:
        place.add_(1)
    with pytest.raises(
        UserError, match=r"CUDA graph writes gradients to fixed places, as pull_back\(set_to_none=False\)"
    ):
        loop.pull_back()


def test_without_gammas():
    """Neither the model nor the optimizer has a substitute for them."""
    loop, reference = (kind(sgd, learnable_gamma=False) for kind in (Loop, InGraph))
    for one in (loop, reference):
        for step in range(3):
            one.backward(step)
            one.pull_back()
            one.update()
    for name, layer in reference.layers.items():
        found = loop.preconditioner.weights[name].orig
        torch.testing.assert_close(found, layer.weight, rtol=0, atol=1e-12)
    assert not any("gamma" in name for name in loop.model.state_dict())


def test_a_frozen_model_has_nothing_to_pull_back():
    """Such as a backbone with PC below a new head."""
    loop = Loop(sgd)
    head = nn.Linear(7, 1).double()
    loop.model.requires_grad_(False)
    head(loop.model(toy_batch(0))).sum().backward()
    before = loop.trained()
    loop.pull_back()
    loop.update()
    assert same(loop.trained(), before)


class NowAndThen(Clearing):
    """Calls its closure only in every second step."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure if self.steps % 2 == 0 else None)


def test_a_step_that_does_not_call_its_closure():
    loop = Loop(lambda p: NowAndThen(p, lr=0.1))
    for step in range(3):
        loop.backward(step)
        loop.pull_back()
        loop.optimizer.step(lambda step=step: loop.backward(step))
        require_pc(loop.preconditioner)
    assert loop.preconditioner.weights["0.attention.wo"].gamma != 1


def test_optimizers_that_share_weights():
    """Two optimizers hold all parameters and step in turn; one is given twice."""
    loop = Loop(lambda p: [torch.optim.SGD(parameters, lr=0.1) for parameters in [[*p]] * 2])
    loop.preconditioner.follow(*loop.optimizers, loop.optimizers[0])
    for step in range(4):
        loop.backward(step)
        loop.pull_back()
        loop.optimizers[step % 2].step()
        loop.zero_grad()
        loop.model(toy_batch(0))
        require_pc(loop.preconditioner)


def test_two_models_that_train_in_turn():
    """The critic's step lies between the generator's forward and backward passes, as in a GAN."""
    found = []
    for kind in (Loop, InGraph):
        generator, critic = kind(sgd), kind(sgd)
        for step in range(3):
            made = generator.model(toy_batch(step))
            toy_loss(critic.model, made.detach()).backward()
            critic.pull_back()
            critic.update()
            toy_loss(critic.model, made).backward()
            generator.pull_back()
            generator.update()
            critic.zero_grad()
        found.append({which: one.trained() for which, one in (("generator", generator), ("critic", critic))})
    for which in found[0]:
        require_near(found[0][which], found[1][which], tolerance=1e-10)


def test_clearing_the_gradients_of_one_optimizer_keeps_those_of_another():
    """Two parts that accumulate over different numbers of batches."""
    found = []
    for kind in (Loop, InGraph):
        loop = kind(one_for_each_block)
        for step in range(3):
            loop.backward(2 * step)
            loop.optimizers[1].zero_grad()
            loop.backward(2 * step + 1)
            loop.pull_back()
            loop.update()
        found.append(loop.trained())
    require_near(*found, tolerance=1e-10)


def test_gammas_alone():
    loop = Loop(adamw)
    for weight in loop.preconditioner.weights.values():
        weight.orig.requires_grad_(False)
    before = loop.trained()
    loop.step()
    assert not same(loop.trained(), before)
    require_pc(loop.preconditioner)


def muon_and_sgd():
    """SGD has the gammas."""

    def matrices_and_others(parameters):
        parameters = [*parameters]
        return [
            torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.1),
            torch.optim.SGD([p for p in parameters if p.ndim < 2], lr=0.1),
        ]

    return Loop(matrices_and_others, wrap=lambda model: nn.Sequential(model, nn.LayerNorm(7).double()))


def test_the_optimizer_of_gammas_clears_no_gradients_of_weights():
    loop = muon_and_sgd()
    loop.backward()
    for optimizer, is_cleared in zip(reversed(loop.optimizers), (False, True), strict=True):
        optimizer.zero_grad()
        assert [w.effective.grad is None for w in loop.preconditioner.weights.values()] == [is_cleared] * 8


def test_gradients_that_are_cleared_after_each_optimizer():
    """W's gradients are gone when the second optimizer, which has the gammas, steps."""
    loop = muon_and_sgd()
    loop.backward()
    loop.pull_back()
    for optimizer in loop.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    require_pc(loop.preconditioner)


def test_an_evaluation_in_inference_mode_between_two_optimizers():
    loop = Loop(one_for_each_block)
    for first, second in (loop.optimizers, loop.optimizers):
        loop.backward()
        loop.pull_back()
        loop.preconditioner.take_worst()
        first.step()
        with torch.inference_mode():
            loop.model(toy_batch(7))  # writes PC(W)
        second.step()
        loop.zero_grad()
    loop.model(toy_batch(7))
    require_pc(loop.preconditioner)


def test_an_optimizer_that_has_stepped_takes_its_state_along():
    """It trained for a while without PC; afterwards its momentum is that of W."""
    model = toy_model()
    optimizer = sgd(model.parameters())
    toy_loss(model, toy_batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = model[0].attention["wo"].weight
    momentum = optimizer.state[weight]["momentum_buffer"].clone()
    preconditioner = pc.precondition(pc.attach(model, PCConfig()), optimizer)
    orig = preconditioner.weights["0.attention.wo"].orig
    assert same(optimizer.state[orig]["momentum_buffer"], momentum) and weight not in optimizer.state
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert id(orig) in held and id(weight) not in held


# --- what the optimizers are


def test_a_wrapped_optimizer_is_followed_once():
    """Wrapped as by accelerate, or in a container whose step calls the optimizer's."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {"lr": 0.1})

        def step(self, closure=None):
            self.inner.step()

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer, self.param_groups, self.zero_grad = inner, inner.param_groups, inner.zero_grad

        def step(self, closure=None):
            self.optimizer.step()

    Wrapper.__module__ = "accelerate.optimizer"  # others may move W after the step
    loops = [Loop(), Loop(lambda p: Outer(adamw(p))), Loop(lambda p: Wrapper(adamw(p)))]
    for loop in loops:
        loop.step(0)
        loop.optimizer.zero_grad()
        loop.step(1)
        assert same(loop.model.state_dict(), loops[0].model.state_dict())


def test_an_optimizer_that_changes_weights_after_its_step():
    """Like a Lookahead that is its own optimizer class."""

    class Lookahead(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.9)

    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # makes torch wrap the base class's `step` for hooks
    loop = Loop(lambda p: Lookahead(p, lr=0.1))
    for batch in range(2):
        loop.step(batch)
        require_pc(loop.preconditioner)


@pytest.mark.parametrize("least", [1, 2])
def test_an_optimizer_can_be_replaced(least):
    """For a second phase of training, by one with or without gammas; the earlier one gets its own parameters back."""
    loop = Loop(sgd)
    loop.step()
    chosen = [parameter for parameter in loop.model.parameters() if parameter.ndim >= least]
    earlier, loop.optimizers = loop.optimizer, [adamw(chosen)]
    loop.preconditioner.follow(loop.optimizer)
    loop.step(1)
    require_pc(loop.preconditioner)
    loop.zero_grad()
    held = {id(p) for p in earlier.param_groups[0]["params"]}
    assert held == {id(p) for name, p in loop.model.named_parameters() if name.endswith("weight")}


def test_one_optimizer_has_one_preconditioner():
    first = Loop()
    model = pc.attach(toy_model(), PCConfig())
    state = model.state_dict()
    first.optimizer.add_param_group({"params": [*model.parameters()]})
    with pytest.raises(UserError, match="a AdamW has a preconditioner already"):
        pc.precondition(model, first.optimizer)
    assert model.state_dict().keys() == state.keys()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_weight_that_is_unfrozen(by_hand):
    """A first phase trains the other layer. If the optimizer lacks W, the error names the call to make."""
    loop = Loop.__new__(Loop)
    loop.model, loop.follows = pc.attach(toy_model(), PCConfig()), not by_hand
    frozen = loop.model[0].requires_grad_(False)
    loop.optimizers = [torch.optim.SGD(loop.model[1].parameters(), lr=0.1)]
    loop.preconditioner = pc.precondition(loop.model, *([] if by_hand else loop.optimizers))
    if by_hand:
        loop.optimizers = [torch.optim.SGD(loop.model.parameters(), lr=0.1)]
    loop.step()
    frozen.requires_grad_()
    if not by_hand:
        loop.optimizer.add_param_group({"params": [*toy_model()[0].parameters()]})
        loop.optimizer.param_groups[1]["params"][:] = [
            p for name, p in frozen.named_parameters() if name.endswith("weight")
        ]
        with pytest.raises(UserError, match=r"was unfrozen; call preconditioner.follow\(optimizer\) first"):
            loop.step()
        loop.zero_grad()
        assert all(weight.gamma == 1 for name, weight in loop.preconditioner.weights.items() if name[0] == "0")
        loop.preconditioner.follow(loop.optimizer)
    for _ in range(2):
        loop.step()
    assert all(weight.gamma != 1 for weight in loop.preconditioner.weights.values())
    held = [id(p) for group in loop.optimizer.param_groups for p in group["params"]]
    assert len(set(held)) == len(held)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_holds_no_weight_with_pc_at_first(fused):
    """As when first a new head is trained and then everything. Only hooks notice the steps of a fused optimizer."""
    model = nn.Sequential(pc.attach(toy_model(), PCConfig()).requires_grad_(False), nn.Linear(7, 7).double())
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-2, fused=fused)
    preconditioner = pc.precondition(model, optimizer)
    start = trained(preconditioner)
    for step in range(4):
        if step == 2:
            assert same(trained(preconditioner), start)
            model[0].requires_grad_()
            optimizer.add_param_group({"params": [*model[0].parameters()]})
        toy_loss(model, toy_batch(step)).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(same(start[name], tensors) for name, tensors in trained(preconditioner).items())
    require_pc(preconditioner)


def test_a_gradient_scaler_that_skips_one_of_two_optimizers():
    """Gradients are pulled back, then unscaled; the reverse order is refused."""
    model = pc.attach(toy_model().float(), PCConfig())
    optimizers = one_for_each_block(model.parameters())
    preconditioner, scaler = pc.precondition(model, *optimizers), torch.amp.GradScaler("cpu", init_scale=4.0)
    start = trained(preconditioner)
    for step in range(2):
        scaler.scale(toy_loss(model, toy_batch(step).float())).backward()
        with pytest.raises(UserError, match=r"preconditioner.pull_back\(\), .* before gradients are unscaled, clipped"):
            scaler.unscale_(optimizers[0])
        if step == 0:
            model[1].attention["wq"].weight.grad.fill_(float("inf"))
        preconditioner.pull_back()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step == 0:
            moved = {name: not same(start[name], tensors) for name, tensors in trained(preconditioner).items()}
            assert {name[0] for name in moved if moved[name]} == {"0"}
            model(toy_batch(0).float())
            require_pc(preconditioner, 1e-5)  # float32
    assert scaler.get_scale() == 2.0
    require_pc(preconditioner, 1e-5)


def test_a_compiled_optimizer_step():
    loop, reference = Loop(sgd), Loop(sgd)
    step = torch.compile(loop.optimizer.step, backend="eager")
    for batch in range(3):
        loop.backward(batch)
        loop.pull_back()
        step()
        loop.optimizer.zero_grad()
        reference.step(batch)
    assert same(loop.trained(), reference.trained())
