import pytest
import torch

from pc_recipe.report import theorem


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("widths, samples", [((8, 12, 12, 6), 6), ((4, 6, 5), 4), ((5, 5, 5, 5, 5), 3)])
def test_loss_falls_as_promised_inside_the_region(widths, samples, seed):
    problem = theorem.make_problem(widths, samples, seed)
    assert all(upper >= 1 >= lower > 0 for upper, lower in zip(problem.upper, problem.lower, strict=True))
    losses, in_region = theorem.descend(problem, problem.beta, 300)
    inside = [*in_region, False].index(False)
    assert inside > 50  # the promise is for steps that start inside the region
    for before, after in zip(losses[:inside], losses[1:inside]):
        assert after <= (1 - problem.mu / problem.beta) * before


def test_mu_and_beta_bound_the_tangent_kernel():
    problem = theorem.make_problem()

    def outputs(*weights):
        return torch.linalg.multi_dot([*reversed(weights), problem.inputs]).flatten()

    jacobians = torch.autograd.functional.jacobian(outputs, tuple(problem.weights))
    sigma = torch.linalg.svdvals(torch.cat([jacobian.flatten(1) for jacobian in jacobians], dim=1))
    assert problem.mu <= sigma[-1] ** 2 < sigma[0] ** 2 <= problem.beta
