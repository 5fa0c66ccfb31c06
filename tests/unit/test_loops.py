"""The loops of docs/loops.md in one process: each gives what the plain loop gives, or one line says why not."""

import copy
import io
import re

import pytest
import torch
from torch import nn

import pc
from helpers.toy import Loop, same, toy_batch, toy_loss, toy_model
from pc import PCConfig, UserError, owner_functions


def attached(**settings):
    return pc.attach(toy_model(), PCConfig(**settings))


def halves(model, make):
    """Two optimizers: of the first block and of the second."""
    return [make([p for p in block.parameters()]) for block in model]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def expected_pc(preconditioner):
    """PC(W) of the preconditioner's W, gamma, u and v, by the reference."""
    return {
        name: pc.effective_weight(w.raw, w.gamma, w.u, w.v, w.config).detach()
        for name, w in preconditioner.weights.items()
    }


def require_holds_pc(model, preconditioner, tolerance=1e-12):
    for name, weight in expected_pc(preconditioner).items():
        found = model.get_submodule(name).weight.detach()
        torch.testing.assert_close(found, weight, rtol=0, atol=tolerance)


# what is trained


def test_a_weight_that_is_unfrozen():
    """A first phase trains the other layer; the call that the error names trains both, gammas too."""
    model = pc.attach(toy_model(), PCConfig())
    frozen = model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preconditioner = pc.precondition(model, optimizer)

    def step():
        toy_loss(model, toy_batch(0)).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()

    step()
    frozen.requires_grad_()
    with pytest.raises(UserError, match=re.escape("was unfrozen; call preconditioner.follow(optimizer)")):
        step()
    optimizer.zero_grad()
    assert all(weight.gamma == 1 for name, weight in preconditioner.weights.items() if name[0] == "0")
    preconditioner.follow(optimizer)
    for _ in range(2):
        step()
    assert all(weight.gamma != 1 for weight in preconditioner.weights.values())
    assert len({id(p) for p in optimizer.param_groups[0]["params"]}) == len(optimizer.param_groups[0]["params"])


def test_a_weight_that_is_unfrozen_in_a_loop_by_hand():
    model = pc.attach(toy_model(), PCConfig())
    frozen = model[0].requires_grad_(False)
    preconditioner = pc.precondition(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for phase in range(2):
        preconditioner.write_pc()
        toy_loss(model, toy_batch(phase)).backward()
        preconditioner.pull_back()
        preconditioner.restore_raw()
        optimizer.step()
        optimizer.zero_grad()
        frozen.requires_grad_()
    assert all(weight.gamma != 1 for weight in preconditioner.weights.values())


def test_an_optimizer_without_a_rate():
    """As Adafactor's relative steps: it trains, although its lr is no number."""

    class Relative(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad is None or p.data.sub_(p.grad)

    loop = Loop(make=lambda p: Relative([{"params": [*p], "lr": None}], lr=0.1))
    before = loop.raw()
    loop.step()
    assert loop.optimizer.param_groups[0]["lr"] is None and not same(loop.raw(), before)
    require_holds_pc(loop.model, loop.preconditioner)


# what the weights hold


@pytest.mark.parametrize("then", ["forward", "load", "step", "detach"])
@pytest.mark.parametrize("at", ["step", "load"])
def test_an_interrupted_write_keeps_w(monkeypatch, at, then):
    """By Ctrl-C in a notebook, or an error that the loop catches: W is saved before the first weight is overwritten."""
    loop = Loop(make=sgd)
    loop.step()
    state = copy.deepcopy(loop.preconditioner.state_dict())
    loop.backward()
    loop.preconditioner.pull_back()
    written = 0

    def write(*given, original=owner_functions.write, **options):
        nonlocal written
        written += 1
        if written == 2:
            raise KeyboardInterrupt
        return original(*given, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner_functions, "write", write)
        loop.optimizer.step() if at == "step" else loop.preconditioner.load_state_dict(state)
    assert not loop.preconditioner.holds_pc
    expected = loop.raw()
    if then == "forward":
        loop.model(toy_batch(0))
        require_holds_pc(loop.model, loop.preconditioner)
    elif then == "load":
        loop.preconditioner.load_state_dict(state)
        expected = {name: (tensors["raw"], tensors["gamma"]) for name, tensors in state.items() if name != "config"}
    elif then == "step":
        loop.optimizer.zero_grad(set_to_none=False)
        loop.optimizer.step()  # of zero gradients
    else:
        weights = {name: w.parameter for name, w in loop.preconditioner.weights.items()}
        pc.detach(loop.model)
        assert same({name: raw for name, (raw, _) in expected.items()}, weights)
        return
    assert same(loop.raw(), expected)


def test_a_skipped_optimizer_is_not_waited_for():
    """As a gradient scaler skips the one whose gradients overflowed: the next forward pass sees PC(W)."""
    model = attached()
    one, other = halves(model, sgd)
    preconditioner = pc.precondition(model, one, other)
    for optimizers in ([one], [other], [one, other]):
        toy_loss(model, toy_batch(0)).backward()
        preconditioner.pull_back()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        model(toy_batch(1))
        require_holds_pc(model, preconditioner)
    plain = toy_model().state_dict()  # control
    assert not any(torch.equal(w.raw, plain[f"{name}.weight"]) for name, w in preconditioner.weights.items())


def test_a_gradient_scaler_that_skips_one_of_two_optimizers():
    model = pc.attach(toy_model().float(), PCConfig())
    one, other = halves(model, sgd)
    preconditioner, scaler = pc.precondition(model, one, other), torch.amp.GradScaler("cpu", init_scale=4.0)
    start = copy.deepcopy(preconditioner.state_dict())
    for step in range(2):
        scaler.scale(toy_loss(model, toy_batch(step).float())).backward()
        if step == 0:
            model[1].attention["wq"].weight.grad.fill_(float("inf"))
        preconditioner.pull_back()
        for optimizer in (one, other):
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    moved = {name: not torch.equal(start[name]["raw"], w.raw) for name, w in preconditioner.weights.items()}
    assert all(moved.values()) and scaler.get_scale() == 2.0
    require_holds_pc(model, preconditioner, 1e-5)  # float32


@pytest.mark.parametrize("read", [lambda m: m.state_dict(), pc.merge, copy.deepcopy], ids=["state", "merge", "copy"])
def test_while_an_optimizer_has_yet_to_step_what_is_read_is_pc(read):
    model = attached()
    one, other = halves(model, sgd)
    preconditioner = pc.precondition(model, one, other)
    toy_loss(model, toy_batch(0)).backward()
    preconditioner.pull_back()
    one.step()
    result = read(model)
    if read is copy.deepcopy:
        with pytest.raises(UserError, match="a copy of a model that held W; .* or use the model itself"):
            result(toy_batch(0))
        return
    state = result if isinstance(result, dict) else result.state_dict()
    for name, weight in expected_pc(preconditioner).items():
        torch.testing.assert_close(state[f"{name}.weight"], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("least", [1, 2])
def test_an_optimizer_can_be_replaced(least):
    """In a second phase of training, by one of all parameters or without gammas; PC(W) is there right after the step, for
    compiled models too."""
    loop = Loop(make=sgd)
    loop.step()
    chosen = [parameter for parameter in loop.model.parameters() if parameter.ndim >= least]
    earlier, loop.optimizer = loop.optimizer, torch.optim.AdamW(chosen, lr=1e-2)
    loop.preconditioner.follow(loop.optimizer)
    loop.step(1)
    assert loop.preconditioner.holds_pc and not earlier._optimizer_step_pre_hooks
    require_holds_pc(loop.model, loop.preconditioner)


def test_a_compiled_pass_that_saw_w_is_not_trained():
    """Its graph has no check; the step is refused, and goes on after the call that the message names."""
    model = attached()
    optimizers = halves(model, sgd)
    preconditioner = pc.precondition(model, *optimizers)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in (0, 1):
        toy_loss(compiled, toy_batch(batch)).backward()
        if batch == 0:
            preconditioner.pull_back()
            optimizers[0].step()  # the other one does not
            model.zero_grad()
    with pytest.raises(UserError, match="call preconditioner.write_pc"):
        preconditioner.pull_back()
    model.zero_grad()
    preconditioner.write_pc()
    toy_loss(compiled, toy_batch(1)).backward()
    preconditioner.pull_back()
    for optimizer in optimizers:
        optimizer.step()
    assert preconditioner.holds_pc  # right after the step
    require_holds_pc(model, preconditioner)


# closures


def test_a_closure_is_a_step():
    one, other = Loop(), Loop()
    for batch in (0, 1):

        def closure(loop=one, batch=batch):
            loop.optimizer.zero_grad()
            loss = toy_loss(loop.model, toy_batch(batch))
            loss.backward()
            return loss

        with torch.no_grad():
            expected = toy_loss(other.model, toy_batch(batch))
        assert torch.equal(one.optimizer.step(closure), expected)
        other.step(batch)
    assert same(one.model.state_dict(), other.model.state_dict())


def test_clipping_what_requires_gradients_clips_gammas_too():
    """As loops have it that freeze some weights. Mode "forward" has the right gammas."""
    gammas = {}
    for mode in ("step", "forward"):
        loop = Loop(mode, make=lambda p: torch.optim.SGD(p, lr=3.0, momentum=0.9))
        for step in range(5):
            loop.backward(step)
            loop.preconditioner.pull_back()
            nn.utils.clip_grad_norm_([p for p in loop.model.parameters() if p.requires_grad], 0.01)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        gammas[mode] = torch.cat([weight.gamma.detach() for weight in loop.preconditioner.weights.values()])
    torch.testing.assert_close(gammas["step"], gammas["forward"], rtol=1e-9, atol=0)
    assert (gammas["step"] - 1).abs().max() > 1e-3  # control: they were trained


def test_clipping_in_a_closure_is_of_gradients_of_w():
    def train(step_by_closure):
        loop = Loop(make=sgd)

        def closure():
            loop.backward()
            loop.preconditioner.pull_back()
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)

        loop.optimizer.step(closure) if step_by_closure else (closure(), loop.optimizer.step())
        return loop.raw()

    assert same(train(True), train(False))


def test_an_optimizer_that_calls_its_closure_again_is_refused():
    loop = Loop(make=lambda p: torch.optim.LBFGS([*p], max_iter=3))

    def closure():
        loop.optimizer.zero_grad()
        loss = toy_loss(loop.model, toy_batch(0))
        loss.backward()
        return loss

    with pytest.raises(UserError, match='LBFGS calls its closure again .* use mode="forward"'):
        loop.optimizer.step(closure)
    forward = Loop("forward", make=lambda p: torch.optim.LBFGS(p, max_iter=3))
    loop, losses = forward, [toy_loss(forward.model, toy_batch(0)).item()]
    forward.optimizer.step(closure)
    assert toy_loss(forward.model, toy_batch(0)) < losses[0]


# states


def test_a_model_resumed_without_its_preconditioner_is_noticed():
    """By a mark in the state's metadata, which files of torch.save keep; the state itself is plain."""
    loop = Loop()
    loop.step()
    file = io.BytesIO()
    torch.save(loop.model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    toy_model().load_state_dict(saved)

    def resume(state):
        model = attached()
        model.load_state_dict(state)
        return model, pc.precondition(model, sgd(model.parameters()))

    model, _ = resume(saved)
    with pytest.raises(
        UserError, match="PC\\(W\\) of a training run: load its preconditioner's state too, or call pc.pres"
    ):
        model(toy_batch(0))
    model, preconditioner = resume(saved)
    preconditioner.load_state_dict(loop.preconditioner.state_dict())
    assert torch.equal(model(toy_batch(0)), loop.model(toy_batch(0)))
    model, preconditioner = resume(dict(saved))  # as W, on purpose
    assert torch.equal(preconditioner.weights["0.attention.wo"].raw, saved["0.attention.wo.weight"])
    merged = pc.merge(copy.deepcopy(loop.model)).state_dict()
    resume(merged)[0](toy_batch(0))  # plain weights of a finished run start another


def test_a_plain_model_with_saved_weights_needs_the_preconditioners_state_too():
    """The mark in the metadata is lost: PC(W) would become W, and each gamma 1. The optimizer's state has the gammas.
    Mode "forward" has its gammas in the model's state, which a plain model refuses."""
    straight = Loop()
    straight.step(0)
    saved = copy.deepcopy([part.state_dict() for part in straight.parts])

    def resume():
        loop = Loop(seed=1)
        plain = toy_model()
        plain.load_state_dict(saved[0])
        loop.model = pc.attach(plain, PCConfig())
        loop.optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        loop.preconditioner = pc.precondition(plain, loop.optimizer)
        return loop

    loop = resume()
    loop.step(1)  # a new run from these weights, on purpose: its optimizer is new
    loop.optimizer.load_state_dict(copy.deepcopy(saved[1]))  # back to its state, as after a step that failed
    loop.step(2)
    for with_its_state in (False, True):
        loop = resume()
        if with_its_state:
            loop.preconditioner.load_state_dict(saved[2])
        loop.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if with_its_state:
            loop.step(1)
            continue
        before = copy.deepcopy(loop.model.state_dict())
        with pytest.raises(UserError, match="load the preconditioner's state too, as that of the optimizer was"):
            loop.step(1)
        assert same(before, loop.model.state_dict())
    straight.step(1)
    assert same(straight.model.state_dict(), loop.model.state_dict())


@pytest.mark.parametrize("settings", [{"level": 1}, {"norm_recovery": False}, {"splits": {"0.attention.wo": None}}])
def test_a_state_of_another_pc_is_refused(settings):
    loop = Loop(blocks=("o", "ffn"))
    other = Loop(blocks=("o", "ffn"), **settings)
    before = copy.deepcopy(other.preconditioner.state_dict())
    with pytest.raises(UserError, match="PC's state has .*; the model has .*: make it with the PCConfig"):
        other.preconditioner.load_state_dict(loop.preconditioner.state_dict())
    assert same(before, other.preconditioner.state_dict())


# all or nothing


def names_and_hooks(model, optimizer=None):
    """What attach, preconditioner and merge may change."""
    modules = [(type(m), sorted(vars(m)), len(m._forward_pre_hooks), len(m._state_dict_hooks)) for m in model.modules()]
    hooks = optimizer and [len(optimizer._optimizer_step_pre_hooks), [len(g["params"]) for g in optimizer.param_groups]]
    return modules, [name for name, _ in model.named_parameters()], hooks


def test_a_refused_attach_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1, 8))
    before = names_and_hooks(model)
    with pytest.raises(UserError, match='1.linear1, a Linear, does not allow; use "step"'):
        pc.attach(model, PCConfig(blocks=("0*", "1.linear*"), mode="forward"))
    assert names_and_hooks(model) == before
    pc.attach(model, PCConfig(blocks=("0*", "1.linear*")))


def test_a_refused_precondition_changes_nothing():
    model = attached()
    optimizer = sgd(model[0].parameters())
    before = names_and_hooks(model, optimizer)
    with pytest.raises(UserError, match="no optimizer given to pc.precondition holds the weight of 1.attention.wo"):
        pc.precondition(model, optimizer)
    with pytest.raises(UserError, match="takes optimizers, not a int"):
        pc.precondition(model, 3)
    assert names_and_hooks(model, optimizer) == before
    pc.precondition(model, [optimizer, sgd(model[1].parameters())])
    model(toy_batch(0))


@pytest.mark.parametrize("mode", ["forward", "step"])
@pytest.mark.parametrize("leave", [pc.merge, pc.detach])
def test_merge_and_detach_leave_a_plain_loop(mode, leave):
    """The optimizer goes on without PC; merge leaves PC(W), detach W, which can be attached again."""
    loop = Loop(mode)
    loop.step()
    output, raw = loop.model(toy_batch(0)).detach(), loop.raw()["0.attention.wo"][0]
    leave(loop.model)
    plain = toy_model()
    plain.load_state_dict(loop.model.state_dict())
    assert [n for n in loop.model.state_dict()] == [n for n in plain.state_dict()]
    if leave is pc.merge:
        torch.testing.assert_close(loop.model(toy_batch(0)), output, rtol=1e-12, atol=1e-12)
    else:
        assert torch.equal(loop.model[0].attention["wo"].weight, raw)
    weight = loop.model[0].attention["wo"].weight.detach().clone()
    toy_loss(loop.model, toy_batch(0)).backward()
    loop.optimizer.step()
    assert not torch.equal(loop.model[0].attention["wo"].weight, weight)
    assert not loop.optimizer._optimizer_step_pre_hooks
    pc.precondition(pc.attach(loop.model, PCConfig()), torch.optim.AdamW(loop.model.parameters()))
    loop.model(toy_batch(0))


# the rest of the list


class ScheduleFree(torch.optim.SGD):
    """Keeps the average of W beside W; `eval` and `train` exchange them in place, as in preconditioner-free optimizers."""

    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", p.detach().clone() + 0.01)
                p.data, self.state[p]["average"] = average, p.data

    train = eval


def test_a_schedule_free_optimizer():
    """Its `eval` and `train` exchange W, with `restore_raw` before them; without it, merge notices."""
    loop = Loop(make=lambda p: ScheduleFree(p, lr=0.1))
    loop.step()
    wrong = copy.deepcopy(loop.parts)
    wrong[1].eval()
    with pytest.raises(UserError, match="was changed while it held PC"):
        pc.merge(wrong[0])
    before = loop.raw()
    loop.preconditioner.restore_raw()
    loop.optimizer.eval()
    loop.model(toy_batch(0))
    require_holds_pc(loop.model, loop.preconditioner)
    name = "0.attention.wo"
    torch.testing.assert_close(
        loop.preconditioner.weights[name].raw, toy_model()[0].attention["wo"].weight, atol=0.1, rtol=1
    )
    assert not same(before[name][0], loop.raw()[name][0])
    loop.preconditioner.restore_raw()
    loop.optimizer.train()
    loop.model(toy_batch(0))
    assert same(before, loop.raw())


def test_preserve_after_precondition_is_refused():
    loop = Loop()
    with pytest.raises(UserError, match="call pc.preserve before pc.precondition"):
        pc.preserve(loop.model)


def test_modules_that_read_weights_of_layers_they_do_not_call():
    """`nn.MultiheadAttention` never calls `out_proj`, and the encoder's fast path calls nothing."""
    torch.manual_seed(0)
    config = PCConfig(blocks=("*.out_proj", "*.linear1"))
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x = torch.randn(2, 3, 8)
    with pytest.raises(UserError, match="it has no preconditioner"):
        pc.attach(model, config)(x)
    pc.precondition(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training = model(x)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(x), training, rtol=1e-5, atol=1e-5)
    plain = pc.detach(model)
    with torch.inference_mode():
        assert (plain(x) - training).abs().max() > 1e-3  # control: W gives another result
    with pytest.raises(UserError, match='does not allow; use "step"'):
        pc.attach(nn.Sequential(nn.MultiheadAttention(8, 2)), PCConfig(blocks=("*.out_proj",), mode="forward"))


def test_an_average_of_the_weights():
    """torch's `AveragedModel` averages PC(W); the average is a copy that can be evaluated and merged."""
    loop = Loop()
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    seen = []
    for batch in range(3):
        loop.step(batch)
        average.update_parameters(loop.model)
        seen.append(loop.model[0].attention["wo"].weight.detach().clone())
    torch.testing.assert_close(average.module[0].attention["wo"].weight, sum(seen) / 3, rtol=1e-12, atol=1e-12)
    merged = pc.merge(copy.deepcopy(average.module))
    assert torch.equal(merged(toy_batch(0)), average(toy_batch(0)))


def test_a_compiled_optimizer_step():
    loop, reference = Loop(make=sgd), Loop(make=sgd)
    step = torch.compile(loop.optimizer.step, backend="eager")
    for batch in range(3):
        loop.backward(batch)
        loop.preconditioner.pull_back()
        step()
        loop.optimizer.zero_grad()
        reference.step(batch)
    assert same(loop.raw(), reference.raw())


def test_words_and_devices():
    assert PCConfig(blocks="ffn").blocks == ("ffn",) and PCConfig(heads="q").heads == ("q",)
    with torch.device("meta"):
        from pc.spectral import initial_vectors

        assert initial_vectors("a", (3, 4))[0].device.type == "cpu"
