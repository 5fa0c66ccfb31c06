"""A training loop with PC: the paper's results, copies, resumes, precision."""

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

import pc
from helpers.toy import InGraph, Loop, adamw, require_near, require_pc, same, sgd, toy_batch, toy_loss, toy_model
from pc import PCConfig, UserError

pytestmark = pytest.mark.fast

MATMUL = torch.backends.cuda.matmul


def _train_by_the_paper(make, steps):
    """Algorithms 1 and 3 of the paper, word for word, in a loop without this project's preconditioner."""
    model, state = toy_model(), {}
    # a second toy model is attached only for its initial u and v
    for name, marked in pc.named_weights(pc.attach(toy_model(), PCConfig())):
        weight = model.get_submodule(name).weight
        gamma = torch.ones(1, dtype=torch.float64, requires_grad=True)
        state[name] = [weight, gamma, *(x.double() for x in marked.split.initial_vectors(name))]

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
    return {name: tuple(x.detach() for x in entry[:2]) for name, entry in state.items()}


@pytest.mark.parametrize(
    "make, tolerance",
    [
        (sgd, 1e-12),
        # AdamW divides by root mean squares near zero, which amplifies rounding by some 1e3 over six steps.
        (adamw, 1e-9),
    ],
    ids=["SGD", "AdamW"],
)
@pytest.mark.parametrize(
    "loop",
    [Loop, lambda make: Loop(make, follow=False), InGraph],
    ids=["followed", "by hand", "in the graph"],
)
def test_a_loop_equals_the_paper(loop, make, tolerance):
    expected, loop = _train_by_the_paper(make, 6), loop(make)
    for step in range(6):
        for i in range(2):
            loop.backward(100 * step + i, scale=0.5)
        loop.pull_back()
        loop.update()
    require_near(loop.trained(), expected, tolerance)
    assert (expected["0.attention.wo"][0] - toy_model()[0].attention["wo"].weight).abs().max() > 1e-3  # control


def test_names_in_the_model_and_its_state():
    """`weight` is PC(W), beside it W, gamma, u and v under the names of torch's spectral_norm, all in the state."""
    loop = Loop()
    names = {f"{name}.weight" for name in loop.preconditioner.weights}
    added = {f"{name}_{key}" for name in names for key in ("orig", "gamma", "u", "v")}
    assert set(loop.model.state_dict()) == set(toy_model().state_dict()) | added
    assert type(loop.model[0].attention["wo"]) is nn.Linear
    for name, weight in loop.preconditioner.weights.items():
        assert torch.equal(weight.orig, toy_model().get_submodule(name).weight)
    require_pc(loop.preconditioner, 1e-14)
    loop.backward()
    layer = loop.model[0].attention["wo"]
    assert layer.weight.grad is not None and layer.weight_orig.grad is None
    loop.pull_back()
    assert layer.weight.grad is None and layer.weight_orig.grad is not None and layer.weight_gamma.grad is not None


def test_plain_states_and_states_with_pc_do_not_load_into_each_other():
    """torch's strict check refuses them; `pc.plain_state_dict` converts."""
    loop, plain = Loop(), toy_model(seed=9)
    loop.step()
    with pytest.raises(RuntimeError, match="Unexpected key.*weight_orig"):
        plain.load_state_dict(loop.model.state_dict())
    plain.load_state_dict(pc.plain_state_dict(loop.model))
    assert torch.equal(plain(toy_batch(0)), loop.model(toy_batch(0)))
    assert list(plain.state_dict()) == list(pc.plain_state_dict(loop.model))
    with pytest.raises(RuntimeError, match="Missing key.*weight_orig"):
        loop.model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    "wrap", [lambda model: checkpoint_wrapper(model[0]), lambda model: nn.Sequential(model, model)]
)
def test_plain_states_have_nothing_of_pc_in_them(wrap):
    """Also if a wrapper has other names than its state, or a module has two names."""
    loop = Loop(wrap=wrap)
    loop.step()
    assert list(pc.plain_state_dict(loop.model)) == list(wrap(toy_model()).state_dict())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["model first", "optimizer first"])
def test_a_resume_goes_on_bitwise(order):
    straight, resumed = Loop(), Loop(seed=1)
    for step in range(3):
        straight.step(step)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in straight.parts], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.step(5)
    resumed.backward(6)  # products kept for the old weights must not be used
    for index in order:
        resumed.optimizer.zero_grad()
        resumed.parts[index].load_state_dict(saved[index])
    for loop in (straight, resumed):
        for step in (3, 4):
            loop.step(step)
    assert same(straight.model.state_dict(), resumed.model.state_dict())


def test_a_state_loads_into_a_model_from_the_meta_device():
    loop = Loop()
    loop.step(0)
    model = pc.attach(toy_model().to("meta"), PCConfig()).to_empty(device="cpu")
    pc.precondition(model)
    model.load_state_dict(loop.model.state_dict())
    assert torch.equal(model(toy_batch(0)), loop.model(toy_batch(0)))


def test_copies_go_on_as_the_originals_do():
    """Model and optimizer copied together train like the originals, but separately; a copy of the model alone can be
    evaluated."""
    loop = Loop()
    loop.step(0)
    alone = pickle.loads(pickle.dumps(copy.deepcopy(loop.model)))
    assert torch.equal(alone(toy_batch(0)), loop.model(toy_batch(0)))
    loaded = pickle.loads(pickle.dumps(loop.model))
    pc.precondition(loaded, adamw(loaded.parameters()))
    assert same(loaded.state_dict(), loop.model.state_dict())  # keeps its W
    twin = copy.copy(loop)
    twin.model, optimizer = copy.deepcopy(loop.parts)
    twin.optimizers = [optimizer]
    twin.preconditioner = pc.precondition(twin.model, optimizer)
    for x in (loop, twin):
        for batch in (1, 2):
            x.step(batch)
    assert same(loop.model.state_dict(), twin.model.state_dict())
    assert not torch.equal(alone(toy_batch(0)), loop.model(toy_batch(0)))  # control: training went on
    with pytest.raises(UserError, match="copy.deepcopy\\(\\(model, optimizer\\)\\), and give the copies to"):
        copy.deepcopy(loop.preconditioner)


@pytest.mark.parametrize("save", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "file"])
def test_a_copy_of_one_layer_holds_that_layer_alone(save):
    loop = Loop()
    loop.step()
    layer, saved = loop.model[0].attention["wo"], save(loop.model[0].attention["wo"])
    assert torch.equal(saved(toy_batch(0)), layer(toy_batch(0)))
    assert len(pickle.dumps(layer)) < len(pickle.dumps(loop.model)) / 4
    assert [name for name, _ in pc.named_weights(saved)] == ["0.attention.wo"]


def test_later_hooks_of_the_optimizer_find_pc():
    """Code that reads weights in a step hook (float8 scales, a moving average) reads the PC(W) of the new W."""
    loop, seen = Loop(), []
    loop.optimizer.register_step_post_hook(lambda *_: seen.append(copy.deepcopy(loop.model.state_dict())))
    loop.step()
    assert same(seen[0], loop.model.state_dict()) and not same(seen[0], Loop().model.state_dict())


@pytest.mark.parametrize("compile_first", [True, False])
def test_a_compiled_model_has_one_graph_and_no_check_in_it(compile_first):
    model, reference = toy_model(), Loop()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    given = pc.attach(compiled if compile_first else model, PCConfig())
    optimizer = adamw(model.parameters())
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


def test_autocast_does_not_lower_the_precision_of_pc():
    """Products in bfloat16 would change PC(W) by 1e-2; autocast may round only the weight of the layer's own matmul."""
    states = []
    for enabled in (False, True):  # autocast leaves float64 as it is
        model = pc.attach(toy_model().float(), PCConfig())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            preconditioner = pc.precondition(model)
            with torch.autocast("cpu", enabled=False):
                toy_loss(model, toy_batch(0).float()).backward()
            preconditioner.pull_back()
            preconditioner.write_pc()
        states.append([model.state_dict(), [p.grad for p in model.parameters()]])
    assert same(*states)


def test_a_model_that_moves_after_precondition_goes_on():
    """All five tensors move; products kept for the old ones are not used."""
    loop = Loop(make=lambda p: torch.optim.SGD(p, lr=0.1))
    loop.backward()
    loop.optimizer.zero_grad()
    loop.model.float()
    for batch in range(2):
        toy_loss(loop.model, toy_batch(batch).float()).backward()
        loop.pull_back()
        loop.update()
    assert {tensor.dtype for tensor in loop.model.state_dict().values()} == {torch.float32}
    require_pc(loop.preconditioner, 1e-5)


def test_frozen_weights_and_unused_layers_stay():
    loop = Loop(make=lambda p: torch.optim.SGD(p, lr=0.1))
    layer = loop.model[1].feed_forward["w1"]
    loop.model[1].feed_forward["w3"].requires_grad_(False)
    layer.weight_gamma.requires_grad_(False)
    loop.model[1].feed_forward["w2"].weight_orig.requires_grad_(False)
    before = loop.trained()
    loop.model[1](loop.model[0](toy_batch(0)).detach()).square().mean().backward()  # only the second block
    loop.pull_back()
    loop.update()
    after = loop.trained()
    assert all(same(before[name], after[name]) for name in after if name.startswith("0."))
    assert not same(before["1.attention.wo"][0], after["1.attention.wo"][0])
    assert layer.weight_gamma == 1 and not layer.weight_gamma.requires_grad
    assert not same(before["1.feed_forward.w1"][0], after["1.feed_forward.w1"][0])
    assert same(before["1.feed_forward.w2"][0], after["1.feed_forward.w2"][0])
    assert same(before["1.feed_forward.w3"], after["1.feed_forward.w3"])


@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_plain_weights_loaded_after_attach(start):
    """Copied into a real model, or assigned to one on the meta device."""
    model, plain = pc.attach(toy_model().to(start), PCConfig()), toy_model(seed=3).state_dict()
    model.load_state_dict(plain, assign=start == "meta")
    pc.precondition(model)
    assert same(model.state_dict(), Loop(seed=3).model.state_dict())


def test_plain_weights_loaded_after_precondition():
    """Or initialised then, as by `reset_parameters`: `restart`, which the error names, makes them W."""
    loop = Loop()
    loop.step()
    loop.model.load_state_dict(toy_model(seed=3).state_dict(), strict=False)
    with pytest.raises(UserError, match="after loading plain weights, call preconditioner.restart"):
        loop.step()
    loop.optimizer.zero_grad()
    loop.preconditioner.restart()
    assert same(loop.model.state_dict(), Loop(seed=3).model.state_dict())
    loop.step()


class Precisions(TorchDispatchMode):
    """Records the precision that float32 matmuls would have on a GPU, by the shape of the result."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "mm" in str(function):
            kind = "vectors" if min(result.shape[-2:]) <= 2 else "matrix"
            self.seen.setdefault(kind, set()).add(MATMUL.fp32_precision)
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
        chosen = MATMUL.fp32_precision
        with precisions:
            loop.call("pull_back", "write_pc")
        assert MATMUL.fp32_precision == chosen
    finally:
        if process == "high":
            torch.set_float32_matmul_precision("highest")
        MATMUL.fp32_precision = before
    assert precisions.seen == {"vectors": {"ieee"}, "matrix": {polynomial}}


def test_merge_of_a_model_of_two_models():
    """As with a student and a teacher: each optimizer gets its parameters back."""
    loops = Loop(), Loop(seed=1)
    pc.merge(nn.ModuleList(loop.model for loop in loops))
    for loop in loops:
        before = copy.deepcopy(loop.model.state_dict())
        toy_loss(loop.model, toy_batch(0)).backward()
        loop.optimizer.step()
        assert not any(torch.equal(tensor, before[name]) for name, tensor in loop.model.state_dict().items())
