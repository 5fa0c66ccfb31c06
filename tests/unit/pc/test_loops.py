"""The loops of docs/loops.md in one process: each trains what the paper's layers in the graph train, or one line says why
not."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import pc
from helpers.toy import (
    InGraph,
    Loop,
    adamw,
    expected_pc,
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
from pc.splits import WeightSplit

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
    """A step that a bad loss skips, before gradients are pulled back or after; and one without gradients."""
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
    """Without `zero_grad`: they add up over steps."""
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
    """What evaluates, copies and saves between the calls."""
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

        def closure():
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


def lbfgs(parameters):
    """It calls its closure several times in a step."""
    return torch.optim.LBFGS([*parameters], lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def one_for_each_block(parameters):
    parameters = [*parameters]
    first = parameters[: len(parameters) // 2]
    return [torch.optim.SGD(some, lr=0.1, momentum=0.9) for some in (first, parameters[len(first) :])]


class Prepared(torch.optim.SGD):
    """Prepares its parameters in `add_param_group`, as some of pytorch_optimizer do."""

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


LOOPS = {
    "accumulation": (accumulate, sgd),
    "pull back per micro-batch": (pull_back_each, sgd),
    "skipped steps": (skip, sgd),
    "no zero_grad": (keep_gradients, sgd),
    "clipping": (clip, sgd),
    "evaluation, copies and states between": (look_around, sgd),
    "closures": (by_closures, adamw),
    "closures that clip": (by_clipping_closures, sgd),
    "LBFGS": (by_closures, lbfgs),
    "two optimizers": (skip, one_for_each_block),
    "closures of two optimizers": (by_closures, one_for_each_block),
    "an optimizer with its own add_param_group": (accumulate, lambda p: Prepared(p, lr=0.1)),
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


def test_without_gammas():
    """Nothing stands for them in model or optimizer."""
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


def test_an_optimizer_that_has_stepped_takes_its_state_along():
    """Trained for a while without PC; its momentum is W's then."""
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
    places = [
        any(p is orig for p in optimizer.param_groups[0]["params"]),
        *(p is weight for p in optimizer.param_groups[0]["params"]),
    ]
    assert places == [True] + [False] * (len(places) - 1)


# --- what the optimizers are


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

    loops = [Loop(), Loop(lambda p: Outer(adamw(p))), Loop(lambda p: Wrapper(adamw(p)))]
    for loop in loops:
        loop.step(0)
        loop.optimizer.zero_grad()
        loop.step(1)
        assert same(loop.model.state_dict(), loops[0].model.state_dict())


def test_an_optimizer_that_changes_weights_after_its_step():
    """As Lookahead does in a class of its own."""

    class Lookahead(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.9)

    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # puts hooks into the step of the class that it extends
    loop = Loop(lambda p: Lookahead(p, lr=0.1))
    for batch in range(2):
        loop.step(batch)
        require_pc(loop.preconditioner)


@pytest.mark.parametrize("least", [1, 2])
def test_an_optimizer_can_be_replaced(least):
    """In a second phase of training, by one of all parameters or without gammas; the earlier one gets its own back."""
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
    """A first phase trains the other layer; where the optimizer lacks the weight, the error names the call."""
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


def test_a_gradient_scaler_that_skips_one_of_two_optimizers():
    """Scaled gradients are pulled back, then unscaled; unscaled before, they are refused."""
    model = pc.attach(toy_model().float(), PCConfig())
    optimizers = one_for_each_block(model.parameters())
    preconditioner, scaler = pc.precondition(model, *optimizers), torch.amp.GradScaler("cpu", init_scale=4.0)
    start = trained(preconditioner)
    for step in range(2):
        scaler.scale(toy_loss(model, toy_batch(step).float())).backward()
        with pytest.raises(UserError, match=r"without preconditioner.pull_back\(\) .* before what unscales, clips"):
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


class ScheduleFree(torch.optim.SGD):
    """Keeps the average of W beside W; `eval` and `train` exchange them in place, as in schedule-free optimizers."""

    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", p.detach().clone() + 0.01)
                p.data, self.state[p]["average"] = average, p.data

    train = eval


def test_a_schedule_free_optimizer():
    """Its `eval` and `train` exchange W, with `write_pc` after them."""
    loop = Loop(lambda p: ScheduleFree(p, lr=0.1))
    loop.step()
    before = loop.trained()
    loop.optimizer.eval()
    loop.preconditioner.write_pc()
    require_pc(loop.preconditioner)
    assert not same(before, loop.trained())
    loop.optimizer.train()
    loop.preconditioner.write_pc()
    assert same(before, loop.trained())
    require_pc(loop.preconditioner)
    loop.step()


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


# --- what the weights hold


@pytest.mark.parametrize("then", ["forward", "pull_back", "load", "step", "merge", "detach"])
def test_an_interrupted_write_keeps_w(monkeypatch, then):
    """By Ctrl-C in a notebook, or an error that the loop catches: the next call that needs PC(W) writes it."""
    loop = Loop(sgd)
    loop.step()
    state = copy.deepcopy(loop.model.state_dict())
    loop.backward()
    loop.pull_back()
    interrupt(monkeypatch, "write", loop.optimizer.step)
    loop.zero_grad()
    expected = loop.trained()
    reference = Loop(sgd)
    reference.step()
    reference.step()
    assert same(expected, reference.trained())
    if then == "load":
        loop.model.load_state_dict(state)
        assert same(loop.model.state_dict(), state)
        loop.step()
        require_pc(loop.preconditioner)
    elif then in ("merge", "detach"):
        effective = expected_pc(loop.preconditioner)
        getattr(pc, then)(loop.model)
        found = loop.model[0].attention["wo"].weight
        wanted = effective["0.attention.wo"] if then == "merge" else expected["0.attention.wo"][0]
        torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=1e-2 if then == "merge" else 0)
    else:
        if then == "step":
            loop.zero_grad(set_to_none=False)
            loop.optimizer.step()  # without gradients
        elif then == "pull_back":
            loop.step()
        loop.model(toy_batch(0))
        require_pc(loop.preconditioner)
        assert then == "pull_back" or same(loop.trained(), expected)


def test_an_interrupted_pull_back_has_done_nothing(monkeypatch):
    loop, other = Loop(sgd), Loop(sgd)
    for each in (loop, other):
        each.backward()
    interrupt(monkeypatch, "pull_back", loop.pull_back)
    for each in (loop, other):
        each.pull_back()
        each.update()
    assert same(loop.model.state_dict(), other.model.state_dict())


def interrupt(monkeypatch, name, call):
    """Ctrl-C while the second matrix is computed."""
    done, original = [], getattr(WeightSplit, name)

    def interrupted(*given, **options):
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt
        return original(*given, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WeightSplit, name, interrupted)
        call()


@pytest.mark.parametrize("read", ["merge", "plain_state_dict", "copy", "forward"])
def test_while_an_optimizer_has_yet_to_step_what_is_read_is_pc(read):
    loop = Loop(one_for_each_block)
    loop.backward()
    loop.pull_back()
    loop.optimizers[0].step()
    if read == "copy":
        with pytest.raises(UserError, match="a copy that was made when not all optimizers had stepped; call"):
            copy.deepcopy(loop.model)(toy_batch(0))
        loop.preconditioner.write_pc()
        copy.deepcopy(loop.model)(toy_batch(0))
    elif read == "merge":
        preconditioner = loop.preconditioner
        effective = {name: weight.effective for name, weight in preconditioner.weights.items()}
        weights = [(weight.split, weight.orig, weight.gamma_values) for weight in preconditioner.weights.values()]
        pc.merge(loop.model)
        for weight, (_, orig, gamma) in zip(effective.values(), weights, strict=True):
            u, s, v = torch.linalg.svd(orig)
            assert (torch.linalg.svdvals(weight)[0] / (gamma * s[0]) - 1).abs() < 0.05  # and not that of W before
    else:
        loop.model(toy_batch(0)) if read == "forward" else pc.plain_state_dict(loop.model)
        require_pc(loop.preconditioner)


def test_a_compiled_pass_that_saw_old_weights_is_not_trained():
    """Its graph has no check; the step is refused, and goes on after the call that the message names."""
    loop = Loop(one_for_each_block)
    compiled = torch.compile(loop.model, backend="aot_eager", fullgraph=True)
    for batch in (0, 1):
        toy_loss(compiled, toy_batch(batch)).backward()
        if batch == 0:
            loop.pull_back()
            loop.optimizers[0].step()  # the other one does not
            loop.model.zero_grad()
    with pytest.raises(UserError, match="call preconditioner.write_pc"):
        loop.pull_back()
    loop.zero_grad()
    loop.preconditioner.write_pc()
    toy_loss(compiled, toy_batch(1)).backward()
    loop.pull_back()
    loop.update()
    require_pc(loop.preconditioner)


def test_a_load_of_some_weights():
    """While one optimizer has yet to step: the weights that were not loaded get their PC(W)."""
    loop, other = Loop(one_for_each_block), Loop(one_for_each_block, seed=1)
    loop.backward()
    loop.pull_back()
    loop.optimizers[0].step()
    loop.zero_grad()
    some = {name: tensor for name, tensor in other.model.state_dict().items() if name.startswith("1.")}
    loop.model.load_state_dict(some, strict=False)
    loop.preconditioner.write_if_stale()
    require_pc(loop.preconditioner)


def test_a_thread_that_evaluates_and_saves():
    """While steps run: W is what it would be without it."""

    def train(is_watched):
        loop, done, failed = Loop(), threading.Event(), []

        def watch():
            while not done.is_set():
                try:
                    loop.model(toy_batch(0))
                    copy.deepcopy(loop.model.state_dict())
                    loop.optimizer.state_dict()
                except Exception as error:
                    failed.append(error)
                    return

        thread = threading.Thread(target=watch)
        if is_watched:
            thread.start()
        for step in range(40):
            loop.step(step)
        done.set()
        if is_watched:
            thread.join()
        assert not failed, failed
        return loop.model.state_dict()

    assert same(train(True), train(False))


def test_an_average_of_the_weights():
    """torch's `AveragedModel` averages PC(W), and W beside it; the average is a copy that can be evaluated and merged."""
    loop = Loop()
    average, seen = torch.optim.swa_utils.AveragedModel(loop.model), []
    for batch in range(3):
        loop.step(batch)
        average.update_parameters(loop.model)
        seen.append(loop.model[0].attention["wo"].weight.detach().clone())
    torch.testing.assert_close(average.module[0].attention["wo"].weight, sum(seen) / 3, rtol=1e-12, atol=1e-12)
    merged = pc.merge(copy.deepcopy(average.module))
    assert torch.equal(merged(toy_batch(0)), average(toy_batch(0)))


def test_a_mask_on_w():
    """Gradients of `weight` are those of PC(W): a mask belongs on `weight_orig` and on its gradient."""
    loop = Loop()
    layer = loop.model[0].attention["wo"]
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) > 0.5
    with torch.no_grad():
        layer.weight_orig.mul_(mask)
    loop.preconditioner.write_pc()
    for batch in range(3):
        loop.backward(batch)
        loop.pull_back()
        layer.weight_orig.grad.mul_(mask)
        loop.update()
    assert not layer.weight_orig[~mask].any() and layer.weight[~mask].abs().max() > 1e-3
    require_pc(loop.preconditioner)


def test_modules_that_read_weights_of_layers_they_do_not_call():
    """`nn.MultiheadAttention` never calls `out_proj`, and the encoder's fast path calls nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x = torch.randn(2, 3, 8)
    with pytest.raises(UserError, match="it has no preconditioner"):
        pc.attach(model)(x)
    pc.precondition(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training = model(x)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(x), training, rtol=1e-5, atol=1e-5)
    plain = pc.detach(model)
    with torch.inference_mode():
        assert (plain(x) - training).abs().max() > 1e-3  # control: W gives another result


# --- all or nothing


def names_and_hooks(model, optimizer):
    """What attach, preconditioner and merge may change."""
    modules = [(type(m), sorted(vars(m)), len(m._forward_pre_hooks), len(m._state_dict_hooks)) for m in model.modules()]
    hooks = len(optimizer._optimizer_step_pre_hooks), [type(g["params"]) for g in optimizer.param_groups]
    return modules, [name for name, _ in model.named_parameters()], hooks, "zero_grad" in vars(optimizer)


def test_a_refused_precondition_changes_nothing():
    model = pc.attach(toy_model(), PCConfig())
    optimizer = sgd(model[0].parameters())
    before = names_and_hooks(model, optimizer)
    with pytest.raises(UserError, match="no optimizer given to pc.precondition holds the weight of 1.attention.wo"):
        pc.precondition(model, optimizer)
    with pytest.raises(UserError, match="takes optimizers, not a int"):
        pc.precondition(model, 3)
    assert names_and_hooks(model, optimizer) == before
    pc.precondition(model, [optimizer, sgd(model[1].parameters())])
    model(toy_batch(0))


@pytest.mark.parametrize("leave", [pc.merge, pc.detach])
def test_merge_and_detach_leave_a_plain_loop(leave):
    """The optimizer goes on without PC; merge leaves PC(W), detach W, which can be attached again."""
    loop = Loop()
    loop.step()
    output, orig = loop.model(toy_batch(0)).detach(), loop.trained()["0.attention.wo"][0]
    leave(loop.model)
    assert list(loop.model.state_dict()) == list(toy_model().state_dict())
    if leave is pc.merge:
        assert torch.equal(loop.model(toy_batch(0)), output)
    else:
        assert torch.equal(loop.model[0].attention["wo"].weight, orig)
    weight = loop.model[0].attention["wo"].weight.detach().clone()
    toy_loss(loop.model, toy_batch(0)).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert not torch.equal(loop.model[0].attention["wo"].weight, weight)
    plain = toy_model()
    assert names_and_hooks(loop.model, loop.optimizer)[:2] == names_and_hooks(plain, adamw(plain.parameters()))[:2]
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not hasattr(loop.model, "_ddp_params_and_buffers_to_ignore")
    pc.precondition(pc.attach(loop.model, PCConfig()), adamw(loop.model.parameters()))
    loop.model(toy_batch(0))


def test_words_and_devices():
    assert PCConfig(blocks="ffn").blocks == ("ffn",) and PCConfig(heads="q").heads == ("q",)
    with torch.device("meta"):
        from pc.spectral import initial_vectors

        assert initial_vectors("a", (3, 4))[0].device.type == "cpu"
