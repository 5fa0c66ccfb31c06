"""The states of `pc.watch`: a step that is skipped, or that raises, costs that step alone."""

import itertools
import threading
import time
from contextlib import suppress

import pytest
import torch

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
)
from pc import PCConfig, UserError

pytestmark = pytest.mark.fast


def thirds(parameters):
    """Every third weight, with its gamma if it has one already."""
    parts, matrices = ([], [], []), 0
    for parameter in parameters:
        matrices += parameter.ndim == 2
        parts[matrices % 3].append(parameter)
    return [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]


def count_writes(loop):
    """A list that gets an entry for each write of PC(W)."""
    step, writes = loop.preconditioner._step, []
    write = step.write
    step.write = lambda *given: [writes.append(1), write(*given)][1]
    return writes


# optimizers, and whether one of them steps
SKIPS = {
    "none": (one_for_each_block, lambda step, index: True),
    "the first once": (one_for_each_block, lambda step, index: (step, index) != (2, 0)),
    "the last once": (one_for_each_block, lambda step, index: (step, index) != (2, 1)),
    "each once, one after the other": (one_for_each_block, lambda step, index: (step, index) not in ((2, 0), (3, 1))),
    "both once": (one_for_each_block, lambda step, index: step != 2),
    "in turn": (one_for_each_block, lambda step, index: step % 2 == index),
    "the second of three once": (thirds, lambda step, index: (step, index) != (2, 1)),
    "all but one of three once": (thirds, lambda step, index: step != 2 or index == 1),
}


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
@pytest.mark.parametrize("make, steps", SKIPS.values(), ids=SKIPS)
def test_each_step_writes_once(make, steps, order):
    """Also after a step that an optimizer skipped; and the result is that of the paper's layers."""
    found = []
    for kind in (Loop, InGraph):
        loop = kind(make)
        writes = count_writes(loop) if kind is Loop else []
        for step in range(6):
            loop.backward(step)
            loop.pull_back()
            stepping = [index for index in range(len(loop.optimizers)) if steps(step, index)][::order]
            for index in stepping:
                loop.optimizers[index].step()
            loop.zero_grad()
            if kind is InGraph and stepping:
                loop.refresh()
            loop.model(toy_batch(0))
            if kind is Loop:
                assert len(writes) == (len(stepping) > 0), step
                require_pc(loop.preconditioner)
            writes.clear()
        found.append(loop.trained())
    require_near(*found)


@pytest.mark.parametrize("make, steps", SKIPS.values(), ids=SKIPS)
def test_a_compiled_model_is_written_by_hand_after_a_skipped_step_alone(make, steps):
    """Its graph has no guard. Once the call is made, steps write by themselves again."""
    loop = Loop(make)
    compiled = torch.compile(loop.model, backend="eager")
    writes = count_writes(loop)
    for step in range(6):
        toy_loss(compiled, toy_batch(step)).backward()
        loop.pull_back()
        stepping = [index for index in range(len(loop.optimizers)) if steps(step, index)]
        for index in stepping:
            loop.optimizers[index].step()
        loop.zero_grad()
        if 0 < len(stepping) < len(loop.optimizers):
            loop.preconditioner.write_pc()
        assert len(writes) == (len(stepping) > 0), step
        require_pc(loop.preconditioner)
        writes.clear()


def test_a_scaler_that_skips_an_optimizer_once():
    model = pc.attach(toy_model().float(), PCConfig())
    loop = Loop.__new__(Loop)
    loop.model, loop.optimizers = model, one_for_each_block(model.parameters())
    loop.preconditioner = pc.precondition(model, *loop.optimizers)
    scaler, writes = torch.amp.GradScaler("cpu", init_scale=4.0), count_writes(loop)
    for step in range(5):
        scaler.scale(toy_loss(model, toy_batch(step).float())).backward()
        if step == 2:
            model[0].attention["wq"].weight.grad.fill_(float("inf"))
        loop.pull_back()
        for optimizer in loop.optimizers:
            scaler.step(optimizer)
        scaler.update()
        loop.zero_grad()
        model(toy_batch(0).float())
        assert len(writes) == step + 1
    assert scaler.get_scale() == 2.0


class Failing(torch.optim.SGD):
    """Raises in its third step, before or after it has moved its parameters."""

    when = "before"

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        fails = self.steps == 3
        if fails and self.when == "before":
            raise ZeroDivisionError
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
        if fails:
            raise ZeroDivisionError


def failing_and_other(parameters):
    halves = [optimizer.param_groups[0]["params"] for optimizer in one_for_each_block(parameters)]
    return [Failing(halves[0], lr=0.1), torch.optim.SGD(halves[1], lr=0.1)]


def test_a_step_that_raises_and_has_moved_nothing_is_a_skipped_step():
    """The loop catches the error and goes on, or tries again."""
    for again in (False, True):
        loop, reference = Loop(failing_and_other), Loop(failing_and_other)
        reference.optimizers[0].steps = 9  # never fails
        writes = count_writes(loop)
        for step in range(5):
            for each in (loop, reference):
                each.backward(step)
                each.pull_back()
                for index, optimizer in enumerate(each.optimizers):
                    if each is reference and (step, index) == (2, 0) and not again:
                        continue
                    with suppress(ZeroDivisionError):
                        optimizer.step()
                        continue
                    if again:
                        optimizer.step()
                each.zero_grad()
                each.model(toy_batch(0))
            assert len(writes) == step + 1
        assert same(loop.model.state_dict(), reference.model.state_dict())


def test_a_step_that_raises_and_has_moved_w_needs_a_write():
    loop = Loop(failing_and_other)
    loop.optimizers[0].when = "after"
    for step in range(3):
        loop.backward(step)
        loop.pull_back()
        with suppress(ZeroDivisionError):
            loop.optimizers[0].step()
            loop.optimizers[1].step()
        loop.zero_grad()
    loop.backward(3)
    with pytest.raises(UserError, match=r"W is newer than PC\(W\).*call preconditioner.write_pc\(\)"):
        loop.pull_back()
    loop.zero_grad()
    loop.preconditioner.write_pc()
    writes = count_writes(loop)
    for step in (4, 5):
        loop.step(step)
    assert len(writes) == 2
    require_pc(loop.preconditioner)


def test_a_step_without_gradients_after_one_that_raised_writes_nothing():
    loop = Loop(lambda p: Failing(p, lr=0.1))
    loop.optimizer.steps = 2
    loop.backward()
    loop.pull_back()
    with pytest.raises(ZeroDivisionError):
        loop.optimizer.step()
    loop.zero_grad()
    writes = count_writes(loop)
    loop.optimizer.step()
    assert not writes


def test_a_second_step_with_the_same_gradients_writes_too():
    loop = Loop(sgd)
    loop.backward()
    loop.pull_back()
    writes = count_writes(loop)
    for wanted in (1, 2):
        loop.optimizer.step()
        assert len(writes) == wanted
        require_pc(loop.preconditioner)


def test_a_step_at_rate_0_with_the_same_gradients_writes_nothing():
    loop = Loop(sgd)
    loop.backward()
    loop.pull_back()
    writes = count_writes(loop)
    for rate in (0.1, 0.0):
        loop.optimizer.param_groups[0]["lr"] = rate
        loop.optimizer.step()
    assert len(writes) == 1


def by_closures(loop, pulls_back):
    """A step of each optimizer; returns the number of writes."""
    writes = count_writes(loop)
    for optimizer in loop.optimizers:

        def closure():
            loop.zero_grad()
            loss = loop.backward()
            if pulls_back:
                loop.pull_back()
            return loss

        optimizer.step(closure)
    return len(writes)


@pytest.mark.parametrize("pulls_back", [False, True], ids=["by itself", "in the closure"])
@pytest.mark.parametrize("make", [one_for_each_block, thirds])
def test_closures_of_several_optimizers_write_at_the_end(make, pulls_back):
    """The second optimizer's closure writes PC(W) of what the first one moved; after the last it is written again."""
    loop = Loop(make)
    for _ in range(3):
        assert by_closures(loop, pulls_back) == len(loop.optimizers)
        require_pc(loop.preconditioner)


def test_a_closure_after_a_skipped_step():
    """The second optimizer skips a step: to the first, in its next step, nobody has yet to step but all."""
    loop = Loop(one_for_each_block)
    skipped = loop.optimizers.pop()
    by_closures(loop, False)
    loop.optimizers.append(skipped)
    for _ in range(2):
        by_closures(loop, False)
        require_pc(loop.preconditioner)


def test_a_write_in_another_thread_while_an_optimizer_steps():
    """As by `pc.plain_state_dict`: what the step moves afterwards is still written at its end."""

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            for half in (0, 1):
                for p in self.param_groups[0]["params"][half::2]:
                    if p.grad is not None:
                        p.data.sub_(p.grad, alpha=0.1) if half else p.detach().sub_(p.grad, alpha=0.1)
                if not half:
                    loop.preconditioner.write_if_stale()

    loop = Loop(lambda p: Slow(p, lr=0.1))
    for step in range(2):
        loop.step(step)
        require_pc(loop.preconditioner)


@pytest.mark.parametrize("begins", ["before the step", "in the step", "before its closure"])
def test_a_step_waits_for_a_write_in_another_thread(begins):
    """Which has read W already, and would put PC(W) of before the step over that of after it."""

    class Starting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            if begins == "before the step":
                order.append("step")
            else:
                start()
            if closure is not None:
                closure()
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)

    def two(parameters):
        first, second = one_for_each_block(parameters)
        return [first, Starting(second.param_groups, lr=0.1)]

    def start():
        thread.start()
        assert reads.wait(10)

    def write(*given):
        if is_slow := threading.current_thread() is thread:
            reads.set()
            time.sleep(0.2)
        order.append("thread" if is_slow else "write")
        return whole_write(*given)

    loop = Loop(two)
    loop.backward()
    loop.pull_back()
    loop.optimizers[0].step()
    whole_write, order, reads = loop.preconditioner._step.write, [], threading.Event()
    loop.preconditioner._step.write = write
    thread = threading.Thread(target=loop.preconditioner.write_if_stale)
    if begins == "before the step":
        start()
    closure = [loop.backward] * (begins == "before its closure")
    loop.optimizers[1].step(*closure)
    thread.join()
    assert order == ["thread", *["step"] * (begins == "before the step"), "write"]
    require_pc(loop.preconditioner)


def test_a_write_that_is_refused_is_made_up_for():
    """A layer was not in its place when the step ended; version counters do not show what a fused optimizer has moved."""
    loop = Loop(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    layer = loop.model[0].attention["wo"]
    loop.backward()
    loop.pull_back()
    loop.model[0].attention["wo"] = torch.nn.Linear(7, 7).double()
    with pytest.raises(UserError, match="0.attention.wo is not in the model any more"):
        loop.optimizer.step()
    loop.zero_grad()
    with pytest.raises(UserError, match="0.attention.wo is not in the model any more"):
        loop.model(toy_batch(0))
    loop.model[0].attention["wo"] = layer
    loop.model(toy_batch(0))
    require_pc(loop.preconditioner)
    loop.step()
    require_pc(loop.preconditioner)


def test_an_optimizer_that_is_followed_between_pull_back_and_step():
    """In the first step of a warm-up its rate is 0."""
    for lr in (0.1, 0.0):
        loop = Loop(sgd)
        other = torch.optim.SGD(loop.model.parameters(), lr=lr)
        loop.backward()
        loop.pull_back()
        loop.preconditioner.follow(other)
        writes = count_writes(loop)
        other.step()
        assert len(writes) == 1
        require_pc(loop.preconditioner)


def test_optimizers_that_are_replaced_while_another_has_yet_to_step():
    loop = Loop(one_for_each_block)
    loop.backward()
    loop.pull_back()
    loop.optimizers[0].step()
    parameters = [*itertools.chain(*(group["params"][:] for one in loop.optimizers for group in one.param_groups))]
    loop.optimizers = [adamw(parameters)]
    loop.preconditioner.follow(loop.optimizer)
    writes = count_writes(loop)
    loop.optimizer.step()
    assert len(writes) == 1
    loop.zero_grad()
    loop.model(toy_batch(0))
    require_pc(loop.preconditioner)
    for step in range(2):
        loop.step(step)
    assert len(writes) == 3
