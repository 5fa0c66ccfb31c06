"""The error of a run whose weights are not finite."""

import math

import pytest
import torch

import pc
from helpers.toy import toy_model
from pc import PCConfig
from pc_recipe.train.nonfinite import FiniteSteps


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_the_trainer_names_the_matrix(one_process, value):
    """One weight of W becomes invalid between two steps, as after a bad optimizer step."""
    model = pc.attach(toy_model().float(), PCConfig(level=4))
    preconditioner = pc.precondition(model)
    name = "1.feed_forward.w2"
    with torch.no_grad():
        preconditioner.weights[name].orig[2, 3] = value
    preconditioner.write_pc()
    finite = FiniteSteps([model], preconditioner, 2)
    loss = model(torch.ones(3, 7)).square().mean()
    loss.backward()
    preconditioner.pull_back()
    is_finite = bool(loss.isfinite())
    assert finite.skips(1, is_finite, range(1))
    with pytest.raises(pc.errors.UserError) as raised:
        finite.skips(2, is_finite, range(1))
    said = str(raised.value)
    assert "\n" not in said
    named = said.partition("not finite now: ")[2].split(",")[0]
    if value == 1e30:
        assert named == f"PC of {name}.weight (largest weight 1.0e+30)"
    else:
        assert named == f"{name}.weight"
