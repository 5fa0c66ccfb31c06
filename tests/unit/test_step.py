import itertools

import pytest
import torch
from torch import nn

import pc
from pc import PCConfig, StepSchedule
from toy import toy_batch, toy_loss, toy_model

# Float64 gradients through one summed and many separate passes differ in rounding alone.
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


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: torch.optim.SGD(p, lr=1e-2)])
def test_own_loop_equals_forward_schedule(make):
    reference = pc.attach(toy_model(), _config("forward"))
    optimizer = make(reference.parameters())
    for step in range(6):
        _backward(reference, 2, step)
        optimizer.step()
        optimizer.zero_grad()

    model = pc.attach(toy_model(), _config("step"))
    optimizer = make(model.parameters())
    schedule = StepSchedule(model)
    schedule.materialise()
    for step in range(6):
        _backward(model, 2, step)
        schedule.pull_back()
        schedule.restore_raw()
        optimizer.step()
        optimizer.zero_grad()
        schedule.materialise()

    raw = {f"{name}.weight": state.raw for name, state in schedule.layers.items()}
    trained = dict(model.named_parameters()) | raw
    # AdamW divides by root mean squares near zero, which amplifies rounding by some 1e3 over six steps.
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=0, atol=1e-9, msg=name)
    x = toy_batch(7)
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-9)
    assert (toy_model()(x) - model(x)).abs().max() > 1e-2  # control: training moved the function


def test_weight_is_the_effective_weight_and_the_state_dict_is_plain():
    model = pc.attach(toy_model(), _config("step"))
    schedule = StepSchedule(model)
    schedule.materialise()
    assert set(model.state_dict()) == set(toy_model().state_dict())
    for name, layer in pc.named_pc_linears(model):
        state = schedule.layers[name]
        expected = pc.effective_weight(state.raw, layer.gamma, state.u, state.v, layer.pc_config)
        # one rounding unit: here the product of one matrix, there of a batch of one
        torch.testing.assert_close(layer.weight, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(state.raw, toy_model().get_submodule(name).weight)
    plain = toy_model(seed=9)
    plain.load_state_dict(model.state_dict())
    x = toy_batch(0)
    assert torch.equal(plain(x), model(x))
    assert torch.equal(pc.merge(model)(x), plain(x))


def test_state_round_trip_continues_bitwise():
    def start(seed):
        model = pc.attach(toy_model(seed=seed), _config("step"))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), StepSchedule(model)

    def train(model, optimizer, schedule, steps):
        for step in steps:
            _backward(model, 2, step)
            schedule.pull_back()
            schedule.restore_raw()
            optimizer.step()
            optimizer.zero_grad()
            schedule.materialise()

    straight = start(0)
    straight[2].materialise()
    train(*straight, range(3))
    saved = [
        {k: v.clone() for k, v in straight[0].state_dict().items()},
        torch.utils._pytree.tree_map(lambda t: t.clone() if torch.is_tensor(t) else t, straight[1].state_dict()),
        torch.utils._pytree.tree_map(torch.clone, straight[2].state_dict()),
    ]
    train(*straight, range(3, 5))
    resumed = start(1)
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    train(*resumed, range(3, 5))
    for name, tensor in straight[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], tensor), name
    for name, tensors in straight[2].state_dict().items():
        for key, tensor in tensors.items():
            assert torch.equal(resumed[2].state_dict()[name][key], tensor), (name, key)


def test_a_state_of_other_layers_is_refused():
    schedule = StepSchedule(pc.attach(toy_model(layers=2), _config("step")))
    other = StepSchedule(pc.attach(toy_model(layers=1), _config("step")))
    with pytest.raises(KeyError, match="other layers"):
        schedule.load_state_dict(other.state_dict())
    plain = StepSchedule(pc.attach(toy_model(layers=2), _config("step", learnable_gamma=False)))
    with pytest.raises(KeyError, match="has"):
        schedule.load_state_dict(plain.state_dict())


def test_calls_out_of_order_are_refused():
    model = pc.attach(toy_model(), _config("step"))
    schedule = StepSchedule(model)
    with pytest.raises(RuntimeError, match="between materialise"):
        schedule.pull_back()
    with pytest.raises(RuntimeError, match="already"):
        schedule.restore_raw()
    schedule.materialise()
    with pytest.raises(RuntimeError, match="in place already"):
        schedule.materialise()
    with pytest.raises(RuntimeError, match="no gradient"):
        schedule.pull_back()
    _backward(model, 1)
    schedule.pull_back()
    with pytest.raises(RuntimeError, match="once per step"):
        schedule.pull_back()


def test_forward_layers_and_meta_weights_are_refused():
    with pytest.raises(ValueError, match="StepSchedule takes"):
        StepSchedule(pc.attach(toy_model(), _config("forward")))
    with torch.device("meta"):
        model = nn.Sequential(nn.ModuleDict({"wo": nn.Linear(3, 3)}))
    with pytest.raises(ValueError, match="meta device"):
        StepSchedule(pc.attach(model, PCConfig(blocks=("0.wo",))))


def test_tf32_is_on_for_the_polynomial_alone(monkeypatch):
    seen = {}
    for owner, name in (
        (pc.passes, "power_iteration_by_gram"),
        (pc.passes, "spectral_norm_estimate"),
        (pc.polynomial, "gram_matrix"),
        (pc.polynomial, "apply"),
        (pc.polynomial, "vjp"),
    ):
        original = getattr(owner, name)

        def noting(*args, name=name, original=original, **kwargs):
            seen[name] = torch.get_float32_matmul_precision()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)
    model = pc.attach(toy_model(), _config("step", compute_dtype="tf32"))
    schedule = StepSchedule(model)
    schedule.materialise()
    _backward(model, 1)
    schedule.pull_back()
    in_full = ("power_iteration_by_gram", "spectral_norm_estimate")
    assert seen == {**dict.fromkeys(in_full, "highest"), **dict.fromkeys(("gram_matrix", "apply", "vjp"), "high")}
    assert torch.get_float32_matmul_precision() == "highest"
