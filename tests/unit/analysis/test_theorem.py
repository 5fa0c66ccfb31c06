import math

import pytest
import torch

from pc.analysis import theorem
from pc.errors import UserError


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("widths, samples", [((8, 12, 12, 6), 6), ((4, 6, 5), 4), ((5, 5, 5, 5, 5), 3)])
def test_loss_falls_as_promised_inside_the_region(widths, samples, seed):
    problem = theorem.make_problem(widths, samples, seed)
    region = theorem.bound(problem)
    assert all(upper >= 1 >= lower > 0 for upper, lower in zip(region.upper, region.lower, strict=True))
    descent = theorem.descend(problem, region, 300)
    inside = descent.in_region.index(False) if not all(descent.in_region) else len(descent.in_region)
    assert inside > 50  # the promise holds for steps from inside the region
    for before, after in zip(descent.losses[:inside], descent.losses[1:inside]):
        assert after <= region.contraction * before
    assert region.contraction < 1


def test_constants_bound_the_tangent_kernel():
    problem = theorem.make_problem()
    region = theorem.bound(problem)
    smallest, largest = theorem.kernel_eigenvalues(problem, problem.weights)
    assert region.mu <= smallest < largest <= region.beta
    # the kernel of a one-layer network is known: X^T X, d_L times over
    one_layer = theorem.Problem(problem.weights[:1], problem.inputs, torch.zeros(12, 6, dtype=torch.float64))
    sigma = torch.linalg.svdvals(problem.inputs)
    expected = (sigma[-1].item() ** 2, sigma[0].item() ** 2)
    assert theorem.kernel_eigenvalues(one_layer, one_layer.weights) == pytest.approx(expected, rel=1e-12)


def test_outside_the_region_the_promise_can_fail():
    """Control: with a step size far above 1/beta the weights leave R and the loss does not fall."""
    problem = theorem.make_problem()
    region = theorem.bound(problem)
    too_large = theorem.Bound(region.lower, region.upper, beta=region.beta / 300, mu=region.mu)
    descent = theorem.descend(problem, too_large, 5)
    assert not all(descent.in_region)
    falls = [after / before for before, after in zip(descent.losses, descent.losses[1:]) if math.isfinite(after)]
    assert max(falls) > 1


def test_leaving_the_region_is_seen():
    problem = theorem.make_problem()
    region = theorem.bound(problem)
    assert theorem.in_region(problem.weights, region)
    assert not theorem.in_region([2 * weight for weight in problem.weights], region)
    assert not theorem.in_region([0.5 * weight for weight in problem.weights], region)


@pytest.mark.parametrize("steps", [0, -3])
def test_no_step_is_refused(steps):
    problem = theorem.make_problem()
    with pytest.raises(UserError, match=f"--steps {steps}: should be 1 or more"):
        theorem.descend(problem, theorem.bound(problem), steps)


def test_pc_trains_raw_weights_through_the_map():
    problem = theorem.make_problem()
    region = theorem.bound(problem)
    plain, with_pc = theorem.descend(problem, region, 50), theorem.descend(problem, region, 50, level=4)
    assert with_pc.losses[0] != plain.losses[0] and with_pc.losses[-1] < with_pc.losses[0]


@pytest.mark.parametrize(
    "widths, samples, word",
    [((8, 6, 9), 4, "rise"), ((8, 6, 4), 4, "rise"), ((8,), 4, "rise"), ((4, 6, 3), 5, "samples")],
)
def test_problems_outside_the_assumptions(widths, samples, word):
    with pytest.raises(UserError, match=word):
        theorem.make_problem(widths, samples)
