import copy
import itertools

import pytest
import torch

import pc
from helpers.toy import toy_batch, toy_loss, toy_model
from pc import PCConfig, StepSchedule

# Float64 gradients of one summed pass and of many separate passes differ only by rounding.
TOLERANCE = 1e-12


def _config(schedule, level=4, **kwargs):
    return PCConfig(level=level, blocks=("o", "ffn"), schedule=schedule, **kwargs)


def _backward(model, micro_batches, step=0):
    for i in range(micro_batches):
        (toy_loss(model, toy_batch(100 * step + i)) / micro_batches).backward()


def _gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("micro_batches", [1, 3, 10])
@pytest.mark.parametrize("level", [1, 2, 3, 4, "polar_express"])
@pytest.mark.parametrize("recovery, gamma", list(itertools.product([True, False], repeat=2)))
def test_gradients_equal_forward(micro_batches, level, recovery, gamma):
    options = {"level": level, "norm_recovery": recovery, "learnable_gamma": gamma, "power_iterations": 100}
    reference = pc.attach(toy_model(), _config("forward", **options))
    _backward(reference, micro_batches)
    expected = _gradients(reference)

    model = pc.attach(toy_model(), _config("step", **options))
    schedule = StepSchedule(model)
    schedule.materialise()
    _backward(model, micro_batches)
    untouched = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    schedule.pull_back()
    actual = _gradients(model)
    assert actual.keys() == expected.keys()
    scale = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() / scale < TOLERANCE, name
    # control: without the pull-back they are far apart
    name = "0.attention.wo.weight"
    assert (untouched[name] - expected[name]).abs().max() > 1e-4


def _train_by_the_paper(make, steps):
    """Algorithms 1 and 3 of the paper, literally, in a loop without this project's schedules."""
    model, state = toy_model(), {}
    preconditioned = [name for name, _ in pc.named_pc_linears(pc.attach(toy_model(), _config("step")))]
    for name in preconditioned:
        weight = model.get_submodule(name).weight
        gamma = torch.ones(1, dtype=torch.float64, requires_grad=True)
        state[name] = [weight, gamma, *(x.double() for x in pc.spectral.initial_vectors(name, weight.shape))]

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
    gammas = {f"{name}.gamma": entry[1] for name, entry in state.items()}
    return dict(model.named_parameters()) | gammas


@pytest.mark.parametrize(
    "make, tolerance",
    [
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), 1e-12),
        # AdamW divides by root mean squares near zero, which amplifies rounding by some 1e3 over six steps.
        (lambda p: torch.optim.AdamW(p, lr=1e-2), 1e-9),
    ],
    ids=["SGD", "AdamW"],
)
def test_own_loop_equals_the_paper(make, tolerance):
    """Schedule "forward"; "step" with an optimizer, with two, and with all calls by hand."""
    expected = _train_by_the_paper(make, 6)

    def train(schedule, start):
        model = pc.attach(toy_model(), _config(schedule))
        optimizers, step_schedule, by_hand = start(model)
        for step in range(6):
            _backward(model, 2, step)
            if step_schedule:
                step_schedule.pull_back()
            if by_hand:
                step_schedule.restore_raw()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if by_hand:
                step_schedule.materialise()
        raw = {f"{n}.weight": s.raw for n, s in step_schedule.layers.items()} if step_schedule else {}
        return dict(model.named_parameters()) | raw

    def one(model):
        optimizer = make(model.parameters())
        return [optimizer], pc.StepSchedule(model, optimizer), False

    def two(model):
        scalars = [p for p in model.parameters() if p.ndim == 1]
        optimizers = [make([p for p in model.parameters() if p.ndim == 2]), make(scalars)]
        return optimizers, pc.StepSchedule(model, *optimizers), False

    def manual(model):
        step_schedule = pc.StepSchedule(model)
        step_schedule.materialise()
        return [make(model.parameters())], step_schedule, True

    runs = [("forward", lambda model: ([make(model.parameters())], None, False))]
    runs += [("step", start) for start in (one, two, manual)]
    for schedule, start in runs:
        actual = train(schedule, start)
        assert actual.keys() == expected.keys()
        for name, parameter in expected.items():
            torch.testing.assert_close(actual[name], parameter, rtol=0, atol=tolerance, msg=f"{start} {name}")
    start = toy_model().state_dict()
    assert max((expected[name] - start[name]).abs().max() for name in start) > 1e-3  # control: they moved


def test_weight_is_the_effective_weight_and_the_state_dict_is_plain():
    model = pc.attach(toy_model(), _config("step"))
    schedule = StepSchedule(model)
    schedule.materialise()
    assert set(model.state_dict()) == set(toy_model().state_dict())
    for name, layer in pc.named_pc_linears(model):
        state = schedule.layers[name]
        expected = pc.effective_weight(state.raw, layer.gamma, state.u, state.v, layer.pc_config)
        # one rounding unit: the matmul of one matrix against that of a batch of one
        torch.testing.assert_close(layer.weight, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(state.raw, toy_model().get_submodule(name).weight)
    plain = toy_model(seed=9)
    plain.load_state_dict(model.state_dict())
    x = toy_batch(0)
    assert torch.equal(plain(x), model(x))
    assert torch.equal(pc.merge(model)(x), plain(x))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["model first", "schedule first"])
def test_state_round_trip_continues_bitwise(order):
    def start(seed):
        model = pc.attach(toy_model(seed=seed), _config("step"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, StepSchedule(model, optimizer)

    def train(model, optimizer, schedule, steps):
        for step in steps:
            _backward(model, 2, step)
            schedule.pull_back()
            optimizer.step()
            optimizer.zero_grad()

    straight = start(0)
    train(*straight, range(3))
    saved = copy.deepcopy([part.state_dict() for part in straight])
    train(*straight, range(3, 5))
    resumed = start(1)
    for index in order:
        resumed[index].load_state_dict(saved[index])
    train(*resumed, range(3, 5))
    for name, tensor in straight[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], tensor), name
    for name, tensors in straight[2].state_dict().items():
        for key, tensor in tensors.items():
            assert torch.equal(resumed[2].state_dict()[name][key], tensor), (name, key)


def test_later_hooks_of_the_optimizer_find_the_effective_weight():
    """Code that reads weights in a step hook (float8 scales, a moving average) reads PC(W), not W."""
    model = pc.attach(toy_model(), _config("step"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = StepSchedule(model, optimizer)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(copy.deepcopy(model.state_dict())))
    _backward(model, 1)
    schedule.pull_back()
    optimizer.step()
    for name, weight in model.state_dict().items():
        assert torch.equal(seen[0][name], weight), name
    name = "0.attention.wo"
    assert not torch.equal(seen[0][f"{name}.weight"], schedule.layers[name].raw)  # control


def test_a_state_of_other_layers_is_refused():
    schedule = StepSchedule(pc.attach(toy_model(layers=2), _config("step")))
    other = StepSchedule(pc.attach(toy_model(layers=1), _config("step")))
    with pytest.raises(pc.UserError, match="differ in layers"):
        schedule.load_state_dict(other.state_dict())
    plain = StepSchedule(pc.attach(toy_model(layers=2), _config("step", learnable_gamma=False)))
    with pytest.raises(pc.UserError, match="has"):
        schedule.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("process", ["none", "tf32", "ieee", "high"])
@pytest.mark.parametrize("compute_dtype", ["tf32", "float32"])
def test_precision_of_products_whatever_the_process_has_chosen(monkeypatch, process, compute_dtype):
    """On a GPU only the polynomial uses TF32, and without TF32 in the config no matmul does."""
    seen, products = {}, torch.backends.cuda.matmul
    before = products.fp32_precision
    if process == "high":  # torch's older setting raises if the newer one contradicts it
        torch.set_float32_matmul_precision(process)
    else:
        products.fp32_precision = process
    chosen = products.fp32_precision
    for owner, name in (
        (pc.passes, "power_iteration_by_gram"),
        (pc.passes, "spectral_norm_estimate"),
        (pc.polynomial, "gram_matrix"),
        (pc.polynomial, "apply"),
        (pc.polynomial, "vjp"),
    ):
        original = getattr(owner, name)

        def noting(*args, name=name, original=original, **kwargs):
            seen[name] = products.fp32_precision
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)
    try:
        model = pc.attach(toy_model(), _config("step", compute_dtype=compute_dtype))
        schedule = StepSchedule(model)
        schedule.materialise()
        _backward(model, 1)
        schedule.pull_back()
        assert products.fp32_precision == chosen
    finally:
        if process == "high":
            torch.set_float32_matmul_precision("highest")
        products.fp32_precision = before
    polynomials = dict.fromkeys(("gram_matrix", "apply", "vjp"), "tf32" if compute_dtype == "tf32" else "ieee")
    assert seen == {**dict.fromkeys(("power_iteration_by_gram", "spectral_norm_estimate"), "ieee"), **polynomials}
