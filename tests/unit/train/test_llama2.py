"""Initial weights; that they do not depend on the layout is tested with whole runs (end_to_end/test_parallelisms.py)."""

from types import SimpleNamespace

import pytest
import torch

import pc
from helpers.tiny import model_args
from pc_recipe.train.llama2 import Llama2, draw_parameter
from pc_recipe.train.parallelize import _attach_pc


def _drawn(name, shape, **changes):
    parameter = torch.empty(shape)
    draw_parameter(name, parameter, model_args("nano", **changes))
    return parameter


def test_a_parameter_is_drawn_by_its_name_and_the_seed():
    name, shape = "layers.2.feed_forward.w2.weight", (400, 700)
    weight = _drawn(name, shape)
    assert torch.equal(weight, _drawn(name, shape))
    others = [_drawn(name.replace("2", "3", 1), shape), _drawn(name, shape, init_seed=1)]
    for other in others:  # five standard errors of a correlation
        assert abs((weight * other).mean() / (weight.std() * other.std())) < 5 / weight.numel() ** 0.5
    assert weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.01)


def test_the_head_is_truncated_at_three_deviations():
    head = _drawn("output.weight", (1000, 500)) * model_args("nano").dim ** 0.5
    assert 2.99 < head.abs().max() <= 3.001
    assert head.var().item() == pytest.approx(0.9733, abs=0.006)  # of a normal distribution that is cut at 3


def test_a_block_may_start_larger():
    plain = _drawn("layers.1.feed_forward.w2.weight", (64, 64))
    larger = _drawn("layers.1.feed_forward.w2.weight", (64, 64), init_factors={"o": 1.6, "ffn": 1.8})
    torch.testing.assert_close(larger, 1.8 * plain)


def test_a_model_with_pc_starts_from_the_w_of_the_baseline():
    with torch.device("meta"):
        models = [Llama2(model_args("nano", vocab_size=64)), pc.attach(Llama2(model_args("nano", vocab_size=64)))]
    for model in models:
        model.to_empty(device="cpu")
        model.init_weights()
    preconditioner = pc.precondition(models[1])
    names = {f"{name}.weight": weight.orig for name, weight in preconditioner.weights.items()}
    assert len(names) == 4 * len(models[0].layers)
    with_pc = dict(models[1].named_parameters()) | names
    for name, parameter in models[0].named_parameters():
        assert torch.equal(with_pc[name], parameter), name


@pytest.mark.parametrize(
    "blocks, count",
    [
        (("o",), 2),
        (("layers.*.attention.wo.weight",), 2),
        (("layers.*.attention.wo", "layers.4.feed_forward.w1.weight", "layers.0.feed_forward.w1.weight"), 3),
        (("layers.0.*.wo",), 0),
    ],
    ids=str,
)
def test_a_stage_of_a_pipeline_has_the_weights_that_the_whole_model_would_have_there(blocks, count):
    """By patterns of layers or of parameters; an entry may find none on a stage."""
    with torch.device("meta"):
        stage = Llama2(model_args("nano", vocab_size=64))
    for layer in ("0", "1", "2"):
        del stage.layers[layer]
    _attach_pc(stage, SimpleNamespace(pp_enabled=True), pc.PCConfig(blocks=blocks))
    assert sum(hasattr(module, "pc_weights") for module in stage.modules()) == count
