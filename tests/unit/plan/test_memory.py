"""Sizes are counted without building the model, whose import takes seconds, but equal those of the model."""

import subprocess
import sys

import pytest
import torch
from torchtitan.models.llama3.model.model import Transformer

from helpers.tiny import ROOT
from pc import attach, named_weights
from pc_recipe.config.model_sizes import FLAVORS, weight_shapes
from pc_recipe.config.schema import Config
from pc_recipe.plan.memory import count_sizes, find_weights
from pc_recipe.train.llama2 import model_args_of

ALL = {"blocks": ["qk", "v", "o", "ffn"], "heads": ["q", "v"], "level": {"qk": 2, "v": 1, "o": 4, "ffn": 4}}


@pytest.mark.parametrize("pc", [{}, {"blocks": ["layers.1.*.wo", "outpu*"]}, ALL], ids=["usual", "patterns", "heads"])
@pytest.mark.parametrize(
    "model",
    [*({"flavor": name} for name in FLAVORS), {"flavor": "nano", "ffn_dim": 100, "n_kv_heads": 2, "vocab_size": 320}],
    ids=str,
)
def test_weights_are_those_of_the_model(model, pc):
    config = Config(model={"n_layers": 2} | model, pc={"enable": True} | pc)
    with torch.device("meta"):
        torchtitans = Transformer(model_args_of(config))
    shapes = [(name, tuple(parameter.shape)) for name, parameter in torchtitans.named_parameters()]
    assert list(weight_shapes(config.model).items()) == shapes
    attach(torchtitans, config.pc.pc_config)
    expected = [(name, weight.split) for name, weight in named_weights(torchtitans)]
    assert [(weight.name, weight.split) for weight in find_weights(config)] == expected
    sizes = count_sizes(config)
    assert sizes.total == sum(parameter.numel() for parameter in torchtitans.parameters())
    in_block = [parameter for _, parameter in torchtitans.layers["1"].named_parameters()]
    assert sizes.block == sum(parameter.numel() for parameter in in_block)
    assert sizes.hidden_matrices == 2 * sum(parameter.numel() for parameter in in_block if parameter.ndim == 2)
    assert sizes.outside_blocks == sizes.total - 2 * sizes.block
    assert sizes.preconditioned == sum(weight.effective.numel() for _, weight in named_weights(torchtitans))


def test_a_check_does_not_import_torchtitan():
    """The import takes longer than everything else that a launcher does."""
    code = """
import sys
from pc_recipe.config import load_config
from pc_recipe.plan.check import check, estimate_hours
report = check(load_config("train_configs/1b_adamw_pc.toml"), 8, needs_data=False)
assert not report.errors and estimate_hours(report, 8) > 0
assert "torch" in sys.modules and "torchtitan" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("ffn_dim", [1, 7, 64, 683, 4096])
def test_the_ffn_has_the_width_that_is_given(ffn_dim):
    config = Config(model={"flavor": "debug", "ffn_dim": ffn_dim, "dim": 200, "n_heads": 2})
    with torch.device("meta"):
        assert Transformer(model_args_of(config)).layers["0"].feed_forward.w1.out_features == ffn_dim
