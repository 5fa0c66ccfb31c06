import re

import pytest

from pc_recipe.config.model_sizes import FLAVORS, count_parameters
from pc_recipe.config.schema import Config

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", [name for name in FLAVORS if re.fullmatch(r"\d+[MB]", name)])
def test_a_size_that_is_named_after_its_parameters_has_them(name):
    """To 6 %: 1B has 1.056."""
    named = int(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    assert count_parameters(Config(model={"flavor": name}).model) == pytest.approx(named, rel=0.06)
