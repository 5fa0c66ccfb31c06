"""A start that preserves the function: PC(W) is the given weight."""

import pytest
import torch

import pc
from helpers.toy import require_pc, toy_batch, toy_loss, toy_model
from pc import PCConfig, UserError
from pc.inverse import invert_matrices, smallest_root
from pc.maps import evaluate, resolve
from pc.method import method_of, power_iteration

pytestmark = pytest.mark.fast

OWN = (2.616, -3.550, 2.731, -0.797)  # as fitted with a cutoff of 0.5; g(1) = 1


@pytest.mark.parametrize("level", [1, 2, 3, 4, OWN])
def test_smallest_root(level):
    values = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    map = resolve(level).map
    roots = smallest_root(map, values)
    torch.testing.assert_close(evaluate(map, roots), values, rtol=0, atol=1e-13)
    # no root is smaller: from 0 up to each root the map stays below the value
    below = evaluate(map, torch.linspace(0, 1, 201, dtype=torch.float64)[:-1, None] * roots)
    assert (below < values + 1e-12).all()


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(512, 512), (512, 1408), (1408, 512)], ids=str)
def test_the_weight_comes_back_in_float32_at_the_60m_shapes(level, shape):
    config = PCConfig(level=level, blocks=("o",))
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(1, *shape, generator=generator)
    raw, u, v = invert_matrices(method_of(config), weight)
    effective = pc.effective_weight(raw, torch.ones(1, 1), u, v, config)
    largest = weight.abs().max()
    assert (effective - weight).abs().max() < 3e-6 * largest  # some roundings of float32
    # control: it does not come back with other vectors, nor with another W
    drawn = (x[None] for x in power_iteration(raw[0], *pc.spectral.initial_vectors("x", shape), 2))
    assert (pc.effective_weight(raw, torch.ones(1, 1), *drawn, config) - weight).abs().max() > 1e-3 * largest
    assert (pc.effective_weight(weight, torch.ones(1, 1), u, v, config) - weight).abs().max() > 1e-2 * largest


@pytest.mark.parametrize("level", [1, {"o": OWN, "ffn": 4}], ids=["1", "own and 4"])
@pytest.mark.parametrize("when", ["before", "in inference mode", "after", "twice"])
def test_an_attached_model_computes_what_it_did(level, when):
    x, model = toy_batch(0), toy_model()
    expected = model(x)
    pc.attach(model, PCConfig(level=level))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when != "after":
        with torch.inference_mode(when == "in inference mode"):
            pc.preserve(model)
    made = pc.precondition(model, optimizer)
    if when == "twice":
        pc.preserve(model)
    if when == "after":  # as if the weights were loaded late
        model.load_state_dict(toy_model().state_dict(), strict=False)
        pc.preserve(model)
    # not exactly, because 1e-7 is added to s, which is near 1
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)
    toy_loss(model, x).backward()
    made.pull_back()
    optimizer.step()
    require_pc(made)
    assert (model(x) - expected).abs().max() > 1e-3
    raw = pc.attach(toy_model(), PCConfig(level=level))
    pc.precondition(raw)
    assert (raw(x) - expected).abs().max() > 1e-2  # control: without `preserve` the given weights become W


@pytest.mark.parametrize(
    "values, said",
    [
        ({"level": "polar_express"}, "only if g\\(1\\) = 1, but level polar_express has"),
        ({"level": [1.49, -0.5]}, "has 0.99"),
        ({"norm_recovery": False}, "can be preserved only with norm_recovery"),
    ],
)
def test_what_cannot_be_preserved_is_refused(values, said):
    with pytest.raises(UserError, match=said):
        pc.preserve(pc.attach(toy_model(), PCConfig(**values)))
