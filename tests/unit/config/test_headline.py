"""The line that says what a configuration trains."""

import pytest

from pc_recipe.config.headline import headline
from pc_recipe.config.schema import Config


@pytest.mark.parametrize(
    "pc, said",
    [
        ({"enable": False}, "no PC"),
        ({"level": 2, "blocks": ["o"]}, "PC level 2 on o (5 of 36 matrices)"),
        ({"level": {"o": 1, "ffn": 4}, "blocks": ["o", "ffn"]}, "PC of several levels on o, gate, up, down (20 of 36 matrices)"),
        ({"level": [2.0, -1.0], "blocks": ["o"]}, "PC of given coefficients on o (5 of 36 matrices)"),
        ({"level": {"o": 4, "ffn": 4}, "blocks": ["o", "ffn"]}, "PC level 4 on o, gate, up, down (20 of 36 matrices)"),
        ({"level": [2.083, -1.643, 0.56], "blocks": ["o"]}, "PC level 2 on o (5 of 36 matrices)"),
        ({"blocks": ["layers.0.*.wo"]}, "PC level 4 on layers.0.*.wo"),
    ],
    ids=str,
)  # fmt: skip
def test_the_headline_says_what_has_pc(pc, said):
    config = Config(model={"flavor": "nano"}, optimizer={"name": "Muon"}, pc={"enable": True} | pc)
    assert headline(config) == f"9.3M Llama, Muon, {said}"
