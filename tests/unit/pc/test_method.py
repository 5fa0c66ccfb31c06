"""Both passes against their readable definitions: power iteration, `effective_weight`, autograd."""

import pytest
import torch

from helpers.toy import leading_vectors
from pc import PCConfig, effective_weight, maps
from pc.method import method_of, power_iteration, second_start
from pc.polynomial import gram_matrix

pytestmark = pytest.mark.fast

LEVELS = [*maps.LEVELS]
OPTIONS = pytest.mark.parametrize("recovery, with_gamma", [(True, True), (False, True), (True, False), (False, False)])
SHAPES = pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])


def _config(level=4, **kwargs):
    return PCConfig(level=level, blocks=("o",), **kwargs)


def _batch(shape, converged=True):
    """W [3, n, m], gamma [3, 1], u [3, n], v [3, m] and a gradient [3, n, m], no two matrices of one norm."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient, u, v = (
        torch.randn(3, *kind, generator=generator, dtype=torch.float64) for kind in (shape, shape, shape[:1], shape[1:])
    )
    weight *= torch.tensor([3.0, 0.02, 1.0], dtype=torch.float64)[:, None, None]
    u, v = (x / x.norm(dim=-1, keepdim=True) for x in (u, v))
    u, v = leading_vectors(weight) if converged else power_iteration(weight, u, v, 2)
    return weight, torch.linspace(0.7, 1.1, 3, dtype=torch.float64)[:, None], u, v, gradient


@pytest.mark.parametrize("level", LEVELS)
@OPTIONS
@SHAPES
def test_write_equals_its_definition(level, recovery, with_gamma, shape):
    # Polar Express diverges above one, and an unconverged estimate leaves singular values there.
    weight, gamma, u, v, _ = _batch(shape, converged=level == "polar_express")
    config = _config(level, norm_recovery=recovery, power_iterations=3, learnable_gamma=with_gamma)
    found, reach = power_iteration(weight, u, v, 3), method_of(config).level.reach
    expected_u, expected_v, _ = second_start(weight, gram_matrix(weight), *found, reach)
    gamma = gamma if with_gamma else torch.ones_like(gamma)
    expected = effective_weight(weight, gamma if with_gamma else None, expected_u, expected_v, config)
    actual, *vectors = method_of(config).evaluate(weight, gamma, u, v)[:3]
    for mine, reference in zip(vectors, (expected_u, expected_v), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-13)
    # float64 rounding; the composite's slope of 2e3 at zero amplifies it
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    fewer = _config(level, norm_recovery=recovery, power_iterations=2)
    two_steps = method_of(fewer).evaluate(weight, torch.ones(3, 1), u, v)
    if level != "polar_express":
        assert (two_steps[1] - expected_u).abs().max() > 1e-3  # control: another number of steps


@pytest.mark.parametrize("level", LEVELS)
@OPTIONS
@SHAPES
def test_pull_back_equals_autograd(level, recovery, with_gamma, shape):
    config = _config(level, norm_recovery=recovery, learnable_gamma=with_gamma)
    weight, gamma, u, v, gradient = _batch(shape, converged=level == "polar_express")
    gamma = (gamma if with_gamma else torch.ones_like(gamma)).requires_grad_()
    trained = (weight.requires_grad_(), gamma) if with_gamma else (weight.requires_grad_(),)
    effective = effective_weight(weight, gamma if with_gamma else None, u, v, config)
    expected = torch.autograd.grad(effective, trained, gradient)
    actual = method_of(config).pull_back(weight, gradient, gamma, u, v)
    wrong = method_of(config).pull_back(weight, gradient, gamma, u, 1.01 * v)
    for mine, reference in zip(actual, expected):
        assert mine.shape == reference.shape
        assert (mine - reference).abs().max() < 1e-11 * reference.abs().max()
    assert (wrong[0] - expected[0]).abs().max() > 1e-3  # control


def test_identity_and_sigma_reparametrisation_are_maps():
    """gamma W / sigma_1 (Zhai et al., arXiv:2303.06296), and W with a gradient that does not change its norm."""
    weight, gamma, u, v, gradient = _batch((6, 9))
    largest = torch.linalg.matrix_norm(weight, 2, keepdim=True)
    for recovery, factor in ((False, 1 / largest), (True, 1.0)):
        config = _config([1.0, 0.0], norm_recovery=recovery)
        found = effective_weight(weight, gamma, u, v, config)
        torch.testing.assert_close(found, gamma[..., None] * weight * factor, rtol=1e-5, atol=0)  # epsilon / norm
        d_weight, _ = method_of(config).pull_back(weight, gradient, gamma, u, v)
        along = torch.einsum("bij,bij->b", d_weight, weight) / (d_weight.norm(dim=(1, 2)) * weight.norm(dim=(1, 2)))
        assert along.abs().max() < 1e-5  # a change of the length of W changes nothing
