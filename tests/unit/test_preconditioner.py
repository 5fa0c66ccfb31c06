"""Both modes in a training loop: the paper's results, copies, resumes, and what a loop may do."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

import pc
from helpers.toy import Loop, same, toy_batch, toy_loss, toy_model
from pc import PCConfig

MATMUL = torch.backends.cuda.matmul
MODES = pytest.mark.parametrize("mode", ["forward", "step"])


def _train_by_the_paper(make, steps):
    """Algorithms 1 and 3 of the paper, literally, in a loop without this project's preconditioner."""
    model, state = toy_model(), {}
    for name, mark in pc.named_weights(pc.attach(toy_model(), PCConfig())):
        weight = model.get_submodule(name).weight
        gamma = torch.ones(1, dtype=torch.float64, requires_grad=True)
        state[name] = [weight, gamma, *(x.double() for x in mark.split.initial_vectors(name))]

    def iterate():
        for entry in state.values():
            weight, _, u, v = entry
            with torch.no_grad():
                for _ in range(10):
                    v = weight.T @ u / (weight.T @ u).norm()
                    u = weight @ v / (weight @ v).norm()
            entry[2:] = u, v

    def effective():
        for name, (weight, gamma, u, v) in state.items():
            s = u @ weight @ v + 1e-7
            a = weight / s
            gram = a @ a.T
            p = 3.625 * torch.eye(len(gram), dtype=torch.float64) - 9.261 * gram + 14.097 * gram @ gram
            p = p - 10.351 * gram @ gram @ gram + 2.890 * gram @ gram @ gram @ gram
            yield f"{name}.weight", gamma * s.detach() * (p @ a)

    optimizer = make([*model.parameters(), *(entry[1] for entry in state.values())])
    iterate()
    for step in range(steps):
        for i in range(2):
            output = torch.func.functional_call(model, dict(effective()), toy_batch(100 * step + i))
            ((output - 1.0).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        iterate()
    return {name: entry[:2] for name, entry in state.items()}


@pytest.mark.parametrize(
    "make, tolerance",
    [
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), 1e-12),
        # AdamW divides by root mean squares near zero, which amplifies rounding by some 1e3 over six steps.
        (lambda p: torch.optim.AdamW(p, lr=1e-2), 1e-9),
    ],
    ids=["SGD", "AdamW"],
)
@pytest.mark.parametrize("how", ["one optimizer", "two optimizers", "by hand"])
@MODES
def test_a_loop_equals_the_paper(mode, how, make, tolerance):
    expected = _train_by_the_paper(make, 6)
    model = pc.attach(toy_model(), PCConfig(mode=mode))
    groups = [[*model.parameters()][i::2] for i in (0, 1)]
    by_hand = how == "by hand"
    if by_hand:
        made = pc.precondition(model)
        made.write_pc()
    optimizers = [make(group) for group in groups] if how == "two optimizers" else [make(model.parameters())]
    if not by_hand:
        made = pc.precondition(model, *optimizers)
    for step in range(6):
        for i in range(2):
            (toy_loss(model, toy_batch(100 * step + i)) / 2).backward()
        made.pull_back()
        if by_hand:
            made.restore_raw()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if by_hand:
            made.write_pc()
    for name, (weight, gamma) in expected.items():
        torch.testing.assert_close(made.weights[name].raw.detach(), weight.detach(), rtol=0, atol=tolerance)
        torch.testing.assert_close(made.weights[name].gamma.detach(), gamma.detach(), rtol=0, atol=tolerance)
    assert (expected["0.attention.wo"][0] - toy_model()[0].attention["wo"].weight).abs().max() > 1e-3  # control


def test_the_weight_is_pc_and_the_state_dict_is_plain():
    loop = Loop()
    assert set(loop.model.state_dict()) == set(toy_model().state_dict())
    for name, state in loop.preconditioner.weights.items():
        layer = loop.model.get_submodule(name)
        assert type(layer) is nn.Linear
        expected = pc.effective_weight(state.raw, layer.gamma, state.u, state.v, state.config)
        # one rounding unit: the matmul of one matrix against that of a batch of one
        torch.testing.assert_close(layer.weight, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(state.raw, toy_model().get_submodule(name).weight)
    plain = toy_model(seed=9)
    plain.load_state_dict(loop.model.state_dict())
    assert torch.equal(plain(toy_batch(0)), loop.model(toy_batch(0)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["model first", "preconditioner first"])
@MODES
def test_a_resume_goes_on_bitwise(mode, order):
    straight, resumed = Loop(mode), Loop(mode, seed=1)
    for step in range(3):
        straight.step(step)
    saved = copy.deepcopy([part.state_dict() for part in straight.parts])
    for index in order:
        resumed.parts[index].load_state_dict(saved[index])
    for loop in (straight, resumed):
        for step in (3, 4):
            loop.step(step)
    assert same(straight.model.state_dict(), resumed.model.state_dict())
    assert same(straight.preconditioner.state_dict(), resumed.preconditioner.state_dict())


@MODES
def test_states_load_into_a_model_from_the_meta_device(mode):
    loop = Loop(mode)
    loop.step(0)
    model = pc.attach(toy_model().to("meta"), PCConfig(mode=mode)).to_empty(device="cpu")
    pc.precondition(model).load_state_dict(loop.preconditioner.state_dict())
    model.load_state_dict(loop.model.state_dict())
    assert same(model.state_dict(), loop.model.state_dict())
    assert torch.equal(model(toy_batch(0)), loop.model(toy_batch(0)))


@MODES
def test_copies_go_on_as_the_originals_do(mode):
    """Copied together they train equally, apart; a copy of the model alone can be evaluated."""
    loop = Loop(mode)
    loop.step(0)
    alone = pickle.loads(pickle.dumps(copy.deepcopy(loop.model)))
    assert torch.equal(alone(toy_batch(0)), loop.model(toy_batch(0)))
    twin = Loop.__new__(Loop)
    twin.model, twin.optimizer, twin.preconditioner = copy.deepcopy(loop.parts)
    for x in (loop, twin):
        for batch in (1, 2):
            x.step(batch)
    assert same(loop.model.state_dict(), twin.model.state_dict()) and same(loop.raw(), twin.raw())
    assert not torch.equal(alone(toy_batch(0)), loop.model(toy_batch(0)))  # control: training went on


def test_later_hooks_of_the_optimizer_find_pc():
    """Code that reads weights in a step hook (float8 scales, a moving average) reads PC(W), not W."""
    loop, seen = Loop(), []
    loop.optimizer.register_step_post_hook(lambda *_: seen.append(copy.deepcopy(loop.model.state_dict())))
    loop.step()
    assert same(seen[0], loop.model.state_dict())
    assert not torch.equal(
        seen[0]["0.attention.wo.weight"], loop.preconditioner.weights["0.attention.wo"].raw
    )  # control


@pytest.mark.parametrize("compile_first", [True, False])
def test_a_compiled_model_has_one_graph_and_no_check_in_it(compile_first):
    model, reference = toy_model(), Loop()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    given = pc.attach(compiled if compile_first else model, PCConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    preconditioner = pc.precondition(given, optimizer)
    for batch in range(3):
        toy_loss(compiled, toy_batch(batch)).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(batch)
    assert counter.frame_count == 1
    torch.testing.assert_close(compiled(toy_batch(0)), reference.model(toy_batch(0)), rtol=0, atol=1e-9)
    assert not any(module._forward_pre_hooks for module in given.modules())


@MODES
def test_autocast_does_not_lower_the_precision_of_pc(mode):
    """A product in bfloat16 would change PC(W) by 1e-2; the weight is rounded to bfloat16 only for the layer's matmul."""
    plain, lowered = (pc.attach(toy_model().float(), PCConfig(mode=mode)) for _ in range(2))
    states = []
    for model, enabled in ((plain, False), (lowered, True)):  # autocast leaves float64 as it is
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made = pc.precondition(model)
            made.write_pc()
            states.append([made.state_dict(), pc.merge(model).state_dict()])
    assert same(*states)


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)])
@MODES
def test_the_step_that_creates_optimizer_state_moves_nothing(mode, make):
    """torch.distributed.checkpoint makes such a step, with zero gradients and lr 0, before the first real one."""
    loop = Loop(mode, make=make)
    before = copy.deepcopy([loop.model.state_dict(), loop.preconditioner.state_dict()])
    get_optimizer_state_dict(loop.model, loop.optimizer)
    assert same(before, [loop.model.state_dict(), loop.preconditioner.state_dict()])
    loop.step()
    assert not same(before[0], loop.model.state_dict())


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_may_be_skipped_after_pull_back(to_none):
    """By a gradient scaler, or because the gradient norm is bad; and an optimizer may step without gradients."""
    loop, other = Loop(), Loop()
    loop.optimizer.step()
    for x, batches in ((loop, (1, 5, 2)), (other, (1, 2))):
        for batch in batches:
            x.backward(batch)
            x.preconditioner.pull_back()
            if batch != 5:
                x.optimizer.step()
            x.optimizer.zero_grad(set_to_none=to_none)
    assert same(loop.model.state_dict(), other.model.state_dict())


def test_a_wrapped_optimizer_is_followed_once():
    """As accelerate wraps it, and as a container steps another optimizer."""

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

    loops = [Loop(), Loop(make=lambda p: Outer(torch.optim.AdamW(p, lr=1e-2))),
             Loop(make=lambda p: Wrapper(torch.optim.AdamW(p, lr=1e-2)))]  # fmt: skip
    for loop in loops:
        loop.step(0)
        loop.optimizer.zero_grad()
        loop.step(1)
        assert same(loop.model.state_dict(), loops[0].model.state_dict())


def test_frozen_weights_and_unused_layers_stay():
    loop = Loop(make=lambda p: torch.optim.SGD(p, lr=0.1))
    loop.model[0].attention["wo"].requires_grad_(False)
    before = loop.raw()
    loop.model[1](loop.model[0](toy_batch(0)).detach()).square().mean().backward()  # of the second block alone
    loop.preconditioner.pull_back()
    loop.optimizer.step()
    after = loop.raw()
    assert all(same(before[name], after[name]) for name in after if name.startswith("0."))
    assert loop.model[1].feed_forward["w1"].gamma != 1
    assert not same(before["1.attention.wo"][0], after["1.attention.wo"][0])


@MODES
def test_plain_weights_loaded_after_attach(mode):
    """Into a real model or one on the meta device, copied or assigned."""
    reference, plain = Loop(mode, seed=3, power_iterations=300), toy_model(seed=3).state_dict()
    for start, assign in (("cpu", False), ("meta", False), ("meta", True)):
        model = pc.attach(toy_model().to(start), PCConfig(mode=mode, power_iterations=300))
        if start == "meta" and not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(copy.deepcopy(plain), strict=False, assign=assign)
        pc.precondition(model).write_pc()
        torch.testing.assert_close(model(toy_batch(0)), reference.model(toy_batch(0)), rtol=1e-9, atol=1e-9)
        assert model[0].attention["wo"].gamma == 1
    if mode == "forward":  # vectors follow weights that are loaded later
        later = Loop(mode, power_iterations=300).model
        later.load_state_dict(plain, strict=False)
        torch.testing.assert_close(later(toy_batch(0)), reference.model(toy_batch(0)), rtol=1e-9, atol=1e-9)


class Precisions(TorchDispatchMode):
    """The precision that a GPU's float32 matmuls would have, by the size of the result."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "mm" in str(function):
            self.seen.setdefault("vector" if 1 in result.shape[-2:] else "matrix", set()).add(MATMUL.fp32_precision)
        return result


@pytest.mark.parametrize("process", ["none", "tf32", "ieee", "high"])
@pytest.mark.parametrize("compute_dtype, polynomial", [("tf32", "tf32"), ("float32", "ieee")])
def test_precision_of_products_whatever_the_process_has_chosen(process, compute_dtype, polynomial):
    """On a GPU only the polynomial uses TF32, and without TF32 in the config no matmul does."""
    before, precisions = MATMUL.fp32_precision, Precisions()
    loop = Loop(compute_dtype=compute_dtype)
    loop.backward()
    try:
        if process == "high":  # torch's older setting raises if the newer one contradicts it
            torch.set_float32_matmul_precision(process)
        else:
            MATMUL.fp32_precision = process
        chosen, precisions.seen = MATMUL.fp32_precision, {}
        with precisions:
            loop.call("pull_back", "restore_raw", "write_pc")
        assert MATMUL.fp32_precision == chosen
    finally:
        if process == "high":
            torch.set_float32_matmul_precision("highest")
        MATMUL.fp32_precision = before
    assert precisions.seen == {"vector": {"ieee"}, "matrix": {polynomial}}
