import copy

import pytest
import torch
from torch import nn

import pc
from helpers.toy import ToyBlock
from pc import PCConfig, PCLinear, UserError


def _model(layers=2, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(ToyBlock(8, 12) for _ in range(layers))).double()


def _forward(level=4, blocks=("o", "ffn"), **kwargs):
    return PCConfig(level=level, blocks=blocks, schedule="forward", **kwargs)


def _names(model):
    return {name for name, _ in pc.named_pc_linears(model)}


def test_default_blocks():
    model = pc.attach(_model(), _forward())
    expected = {f"{i}.{n}" for i in (0, 1) for n in ("attention.wo", *(f"feed_forward.w{k}" for k in (1, 2, 3)))}
    assert _names(model) == expected


def test_groups_and_level_per_block():
    model = pc.attach(_model(1), _forward(level={"qk": 1, "v": "polar_express"}, blocks=("qk", "v")))
    levels = {name: layer.pc_config.level for name, layer in pc.named_pc_linears(model)}
    assert levels == {"0.attention.wq": 1, "0.attention.wk": 1, "0.attention.wv": "polar_express"}


def test_full_name_pattern_on_any_module():
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))})
    pc.attach(model, _forward(blocks=("encoder.[02]",)))
    assert _names(model) == {"encoder.0", "encoder.2"}
    assert model["encoder"][0].bias is not None


@pytest.mark.parametrize(
    "blocks, message",
    [
        (("ffm",), "'ffm' is not a block"),
        ((), "empty"),
        (("o", "o"), "twice"),
        (("decoder.*",), "matches no layer"),
        (("*.attention",), "ModuleDict, not nn.Linear"),
        (("ffn", "gate"), "an earlier entry"),
    ],
)
def test_wrong_blocks(blocks, message):
    with pytest.raises(UserError, match=message):
        pc.attach(_model(), _forward(blocks=blocks))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"level": 7}, "level 7 does not exist"),
        ({"level": {"o": 4}}, "pc.level names"),
        ({"level": [4]}, "two or more numbers"),
        ({"level": [1.5, "x"]}, "two or more numbers"),
        ({"level": [1.5, float("nan")]}, "two or more numbers"),
        ({"level": [3.0, -1.0]}, r"g\(1\) = 2|g\(1\.\d+\) = 2\.0"),
        ({"level": {"o": 4, "ffn": [2.0, -3.0]}}, r"g\(1\.1\) = -1\.793"),
        ({"power_iterations": 0}, "power_iterations"),
        ({"schedule": "steps"}, 'must be "forward" or "step"'),
        ({"compute_dtype": "fp8"}, "compute_dtype"),
        ({"compute_dtype": "tf32", "schedule": "forward"}, "tf32"),
    ],
)
def test_wrong_config(values, message):
    with pytest.raises(UserError, match=message):
        PCConfig(**values)


def test_a_map_of_ones_own_is_a_level():
    """The published coefficients of level 2 are level 2, for all blocks or one; a g(1) far from 1 is warned of."""
    own = [2.083, -1.643, 0.560]
    x = torch.randn(3, 8, dtype=torch.float64)
    outputs = [pc.attach(_model(), _forward(level=level))(x) for level in (2, own, {"o": own, "ffn": 2})]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert not torch.equal(pc.attach(_model(), _forward(level=[2.083, -1.643, 0.559]))(x), outputs[0])
    with pytest.warns(UserWarning, match=r"g\(1\) = 0\.9\b"):
        PCConfig(level=[1.4, -0.5])


def test_attach_twice_is_refused():
    model = pc.attach(_model(), _forward())
    with pytest.raises(UserError, match="already has PC"):
        pc.attach(model, _forward())


def test_a_layer_used_twice_is_one_layer():
    def model():
        torch.manual_seed(0)
        linear = nn.Linear(4, 4)
        return nn.Sequential(linear, nn.Tanh(), linear)

    attached = pc.attach(model(), _forward(blocks=("0*",)))
    assert attached[0] is attached[2] and isinstance(attached[0], PCLinear)
    x = torch.randn(3, 4)
    expected = attached(x)
    merged = pc.merge(attached)
    assert merged[0] is merged[2] and torch.equal(merged(x), expected)
    assert not torch.allclose(model()(x), expected)


def test_a_weight_of_two_layers_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(UserError, match="0.weight is shared with 1"):
        pc.attach(model, _forward(blocks=("0*",)))


class Doubled(nn.Linear):
    """A linear layer with its own matmul, like those of quantisation libraries."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_with_its_own_product_keeps_it_in_schedule_step():
    torch.manual_seed(0)
    model = nn.Sequential(Doubled(6, 4))
    raw, x = model[0].weight.detach().clone(), torch.randn(3, 6)
    pc.attach(model, PCConfig(blocks=("0*",), schedule="step"))
    assert isinstance(model[0], PCLinear) and isinstance(model[0], Doubled)
    schedule = pc.StepSchedule(model)
    schedule.materialise()
    state = schedule.layers["0"]
    effective = pc.effective_weight(raw, model[0].gamma, state.u, state.v, model[0].pc_config)
    torch.testing.assert_close(model(x), 2 * (x @ effective.T + model[0].bias))
    assert (model[0].weight - raw).abs().max() > 1e-2


def test_a_layer_with_its_own_product_is_refused_in_the_graph():
    with pytest.raises(UserError, match='would replace Doubled.forward of 0; use "step"'):
        pc.attach(nn.Sequential(Doubled(6, 4)), _forward(blocks=("0*",)))


def test_weight_keeps_its_name_and_is_shared():
    model = _model()
    keys = set(model.state_dict())
    weights = {k: v.data_ptr() for k, v in model.state_dict().items()}
    pc.attach(model, _forward())
    state = model.state_dict()
    assert keys <= set(state)
    assert {k.rsplit(".", 1)[1] for k in set(state) - keys} == {"gamma", "u", "v"}
    assert all(state[k].data_ptr() == pointer for k, pointer in weights.items())


def test_merge_gives_plain_linears_with_equal_output():
    model = pc.attach(_model(), _forward())
    x = torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        for _, layer in pc.named_pc_linears(model):
            layer.gamma.fill_(1.3)
    expected = model(x)
    merged = pc.merge(copy.deepcopy(model))
    assert set(merged.state_dict()) == set(_model().state_dict())
    assert all(type(m) is nn.Linear for m in merged.modules() if isinstance(m, nn.Linear))
    torch.testing.assert_close(merged(x), expected, rtol=0, atol=0)
    # control: PC does change the function
    assert (_model()(x) - expected).abs().max() > 1e-3


def test_a_merged_layer_stays_frozen_and_in_eval_mode():
    model = pc.attach(_model(), _forward()).eval()
    names = [name for name, _ in pc.named_pc_linears(model)][:2]
    model.get_submodule(names[0]).weight.requires_grad_(False)
    merged = pc.merge(model)
    assert [merged.get_submodule(name).weight.requires_grad for name in names] == [False, True]
    assert {layer.training for layer in merged.modules()} == {False}


def test_power_iteration_follows_the_optimizer_once_per_step():
    model = pc.attach(_model(1), _forward(power_iterations=2))
    layer = model[0].attention["wo"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        before = layer.u.clone(), layer.v.clone()
        for _ in range(2):
            model(torch.randn(4, 8, dtype=torch.float64)).square().mean().backward()
            assert torch.equal(layer.u, before[0])  # unchanged within a step
        optimizer.step()
        optimizer.zero_grad()
        expected = pc.spectral.power_iteration(layer.weight.detach(), *before, 2)
        assert torch.equal(layer.u, expected[0]) and torch.equal(layer.v, expected[1])
        assert not torch.equal(layer.u, before[0])


def test_state_dict_round_trip_restores_everything():
    model = pc.attach(_model(seed=1), _forward())
    other = pc.attach(_model(seed=2), _forward())
    other.load_state_dict(model.state_dict())
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(other(x), model(x))


def test_under_compile_equals_eager_without_graph_break():
    model = pc.attach(_model(1), _forward())
    x = torch.randn(3, 8, dtype=torch.float64)
    eager = model(x).sum()
    eager.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_from_the_meta_device():
    """gamma = 1 and new vectors are created automatically; a forward pass before the weights exist is refused."""
    with torch.device("meta"):
        model = _model(1)
    pc.attach(model, _forward())
    model.to_empty(device="cpu")
    for _, layer in pc.named_pc_linears(model):
        assert layer.gamma.item() == 1.0
        assert layer.u.norm().item() == pytest.approx(1.0, abs=1e-6)
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.raises(UserError, match="meta device; call pc.refresh"):
        model(x)
    expected = pc.attach(_model(1), _forward())
    weights = {key: value for key, value in expected.state_dict().items() if key.endswith("weight")}
    model.load_state_dict(weights, strict=False)  # loading plain weights refreshes automatically
    assert torch.equal(model(x), expected(x))


def test_repr_shows_the_settings():
    text = repr(pc.attach(_model(1), _forward(level=2)))
    assert "level=2, schedule=forward, norm_recovery=True, learnable_gamma=True" in text
