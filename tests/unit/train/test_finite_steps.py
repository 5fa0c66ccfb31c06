"""The error of a run whose weights are not finite."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pc
from helpers.toy import toy_model
from pc import PCConfig
from pc_recipe.train.nonfinite import Diverged, FiniteSteps


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


def test_only_steps_in_a_row_end_a_run(monkeypatch):
    """The error names the data of all of them, and tensors that are not finite, perhaps on another rank alone."""

    def gather(of_ranks, own):
        of_ranks[:] = [["gradient of a"], own]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "abcdef"})
    for name, value in zip("abcdef", (1.0, math.inf, math.nan, math.nan, math.nan, math.nan), strict=True):
        model[name].grad = torch.tensor([0.0, value])
    finite = FiniteSteps([model], None, 3)
    found = [finite.skips(step, step in (3, 6), range(12 * step, 12 * step + 12)) for step in range(1, 9)]
    assert found == [True, True, False, True, True, False, True, True] and finite.count == 6
    with pytest.raises(Diverged) as raised:
        finite.skips(9, False, range(108, 120))
    said = str(raised.value)
    assert said.startswith(
        "the loss or the gradient norm was not finite in 3 steps in a row, up to step 9; data positions 84-119; not finite "
        "now: gradient of a, gradient of b, gradient of c, gradient of d. None of these steps changed the weights"
    )
    assert "data.skip" in said and "\n" not in said
