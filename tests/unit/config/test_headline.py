"""What a configuration says that it trains."""

import pytest

from pc_recipe.config.headline import count_parameters, headline
from pc_recipe.config.model_sizes import FLAVORS
from pc_recipe.config.schema import Config
from pc_recipe.plan.memory import count_sizes_of_config


@pytest.mark.parametrize(
    "model",
    [*({"flavor": name} for name in FLAVORS), {"flavor": "nano", "ffn_dim": 100, "n_kv_heads": 2, "vocab_size": 320}],
    ids=str,
)
def test_parameters_are_those_of_the_model(model):
    config = Config(model={"n_layers": 2} | model, pc={"enable": False})
    assert count_parameters(config.model) == count_sizes_of_config(config).total


@pytest.mark.parametrize(
    "pc, said",
    [
        ({"enable": False}, "no PC"),
        ({"level": 2, "blocks": ["o"]}, "PC level 2 on o (5 of 36 matrices)"),
        ({"blocks": ["o", "ffn"]}, "PC level 4 on o, gate, up, down (20 of 36 matrices)"),
        ({"level": {"o": 1, "ffn": 4}, "blocks": ["o", "ffn"]}, "PC of several levels on o, gate, up, down (20 of 36 matrices)"),
        ({"blocks": ["layers.0.*.wo"]}, "PC level 4 on layers.0.*.wo"),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_calls_itself_what_it_is(pc, said):
    config = Config(model={"flavor": "nano"}, optimizer={"name": "Muon"}, pc={"enable": True} | pc)
    assert headline(config) == f"9.3M Llama, Muon, {said}"
