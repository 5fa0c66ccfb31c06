"""What weights and optimizers hold between the calls of a loop when something reads, copies, saves, loads or interrupts."""

import copy
import threading

import pytest
import torch
from torch import nn

import pc
from helpers.toy import (
    Loop,
    adamw,
    expected_pc,
    one_for_each_block,
    require_pc,
    same,
    sgd,
    toy_batch,
    toy_loss,
    toy_model,
)
from pc import PCConfig, UserError
from pc.splits import WeightSplit

# --- what the weights hold


@pytest.mark.parametrize("then", ["forward", "pull_back", "load", "step", "merge", "detach"])
def test_an_interrupted_write_keeps_w(monkeypatch, then):
    """After Ctrl-C in a notebook, or an error that the loop catches, the next call that needs PC(W) writes it."""
    loop = Loop(sgd)
    loop.step()
    state = copy.deepcopy(loop.model.state_dict())
    loop.backward()
    loop.pull_back()
    interrupt(monkeypatch, "evaluate", loop.optimizer.step)
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
    """Press Ctrl-C while the second matrix is computed."""
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
        for use in (pc.merge, pc.plain_state_dict, lambda model: model(toy_batch(0))):
            with pytest.raises(UserError, match="this copy was made before all optimizers had stepped; call"):
                use(copy.deepcopy(loop.model))
        loop.preconditioner.write_pc()
        copy.deepcopy(loop.model)(toy_batch(0))
    elif read == "merge":
        weights = [(w.effective, w.orig, w.gamma) for w in loop.preconditioner.weights.values()]
        pc.merge(loop.model)
        for weight, orig, gamma in weights:
            u, s, v = torch.linalg.svd(orig)
            assert (torch.linalg.svdvals(weight)[0] / (gamma * s[0]) - 1).abs() < 0.05  # PC of the new W
    else:
        loop.model(toy_batch(0)) if read == "forward" else pc.plain_state_dict(loop.model)
        require_pc(loop.preconditioner)


def test_a_state_that_is_loaded_while_an_optimizer_has_yet_to_step_is_read_as_it_is():
    loop, other = Loop(one_for_each_block), Loop(one_for_each_block, seed=1)
    loop.backward()
    loop.pull_back()
    loop.optimizers[0].step()
    loop.model.load_state_dict(other.model.state_dict())
    assert torch.equal(loop.model(toy_batch(0)), other.model(toy_batch(0)))
    assert same(loop.model.state_dict(), other.model.state_dict())


@pytest.mark.parametrize("read", [pc.merge, pc.plain_state_dict])
@pytest.mark.parametrize("blocks", [("o", "ffn"), ("0.feed_forward.w1",)])  # of the second u and v have 17 entries
def test_a_model_in_half_precision_is_exported_but_not_trained(read, blocks):
    loop = Loop(blocks=blocks)
    loop.step()
    expected = {name: tensor.bfloat16() for name, tensor in pc.plain_state_dict(loop.model).items()}
    loop.model.bfloat16()
    toy_loss(loop.model, toy_batch(0).bfloat16()).backward()
    with pytest.raises(UserError, match="is torch.bfloat16, but W needs float32"):
        loop.pull_back()
    loop.zero_grad()
    state = read(loop.model)
    assert same(state if isinstance(state, dict) else state.state_dict(), expected)


def test_a_compiled_pass_that_saw_old_weights_is_not_trained():
    """Its graph has no check. The pull-back is refused; after the call that the message names, training continues."""
    loop = Loop(one_for_each_block)
    compiled = torch.compile(loop.model, backend="aot_eager", fullgraph=True)
    for batch in (0, 1):
        toy_loss(compiled, toy_batch(batch)).backward()
        if batch == 0:
            loop.pull_back()
            loop.optimizers[0].step()  # the other optimizer does not step
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
    """While one optimizer has yet to step; the weights that were not loaded still get their PC(W)."""
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
    """While steps run in another; W is the same as without the thread."""

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


def test_weights_that_a_trainer_has_broadcast():
    """DDP writes their own values into them."""
    loop, other = Loop(), Loop()
    for weight in loop.preconditioner.weights.values():
        weight.effective.detach().mul_(1.0)
    loop.preconditioner.note_wrapped()
    loop.step()
    other.step()
    assert same(loop.model.state_dict(), other.model.state_dict())


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
    """What attach, precondition and merge may change."""
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
    """The optimizer continues without PC. merge leaves PC(W); detach leaves W, which can be attached again."""
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
    state, plain = loop.optimizer.state_dict(), toy_model()
    assert len(state["state"]) == len([*plain.parameters()])
    adamw(plain.parameters()).load_state_dict(state)
    assert names_and_hooks(loop.model, loop.optimizer)[:2] == names_and_hooks(plain, adamw(plain.parameters()))[:2]
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not hasattr(loop.model, "_ddp_params_and_buffers_to_ignore")
    pc.precondition(pc.attach(loop.model, PCConfig()), adamw(loop.model.parameters()))
    loop.model(toy_batch(0))


def test_detach_before_all_optimizers_have_stepped_leaves_a_plain_model():
    """At that point PC(W) has not been written; nothing may write it into the plain model later."""
    model = pc.attach(toy_model(), PCConfig())
    first, _ = optimizers = [adamw(layer.parameters()) for layer in model[:2]]
    preconditioner = pc.precondition(model, *optimizers)
    toy_loss(model, toy_batch(0)).backward()
    preconditioner.pull_back()
    first.step()
    weights = [p.clone() for p in pc.detach(model).parameters()]
    model(toy_batch(0))
    assert all(map(torch.equal, model.parameters(), weights))
    assert names_and_hooks(model, first)[0] == names_and_hooks(toy_model(), first)[0]


class PassingOn(nn.Module):
    """Passes attribute lookups on to the wrapped module, like the wrappers of peft and Lightning Fabric."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)


def test_a_model_that_is_wrapped_later_is_merged():
    loop = Loop(sgd)
    loop.step()
    expected = pc.plain_state_dict(loop.model)
    merged = pc.merge(PassingOn(loop.model))
    assert same(merged.state_dict(), {f"module.{name}": value for name, value in expected.items()})
