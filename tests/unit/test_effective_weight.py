import pytest
import torch

from pc import PCConfig, effective_weight, polynomial
from pc.spectral import EPSILON, power_iteration, spectral_norm_estimate

LEVELS = [1, 2, 3, 4, "polar_express"]


def _config(level=4, **kwargs):
    return PCConfig(level=level, blocks=("o",), schedule="forward", **kwargs)


def _weight(n=6, m=9, seed=0, converged=True):
    generator = torch.Generator().manual_seed(seed)
    weight = 3.0 * torch.randn(n, m, generator=generator, dtype=torch.float64)
    u = torch.randn(n, generator=generator, dtype=torch.float64)
    v = torch.randn(m, generator=generator, dtype=torch.float64)
    u, v = power_iteration(weight, u / u.norm(), v / v.norm(), 3000 if converged else 2)
    return weight, torch.tensor([0.7], dtype=torch.float64), u, v


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recovery", [True, False])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
@pytest.mark.parametrize("converged", [True, False])
def test_singular_values(level, recovery, shape, converged):
    """Singular values of PC(W) are gamma * s * |g(sigma / s)|, whether or not s has converged."""
    # the composite diverges above sigma / s = 1.11, which two iterations on a small matrix exceed
    weight, gamma, u, v = _weight(*shape, converged=converged or level == "polar_express")
    effective = effective_weight(weight, gamma, u, v, _config(level, norm_recovery=recovery))
    s = spectral_norm_estimate(weight, u, v)
    sigma = torch.linalg.svdvals(weight)
    expected = gamma * (s if recovery else 1.0) * polynomial.evaluate(polynomial.resolve(level), sigma / s).abs()
    # relative to the largest: float64 rounding, times the composite's slope of about 2e3 at zero
    tolerance = 1e-10 if level == "polar_express" else 1e-12
    scale = expected.max()
    torch.testing.assert_close(
        torch.linalg.svdvals(effective) / scale, expected.sort(descending=True).values / scale, rtol=0, atol=tolerance
    )


def test_batch_equals_one_by_one():
    items = [_weight(seed=i) for i in range(3)]
    batched = effective_weight(*(torch.stack(part) for part in zip(*items, strict=True)), _config())
    for i, item in enumerate(items):
        torch.testing.assert_close(batched[i], effective_weight(*item, _config()), rtol=1e-13, atol=1e-13)


def test_gamma_off_is_gamma_one():
    weight, _, u, v = _weight()
    one = torch.ones(1, dtype=torch.float64)
    assert torch.equal(
        effective_weight(weight, None, u, v, _config(learnable_gamma=False)),
        effective_weight(weight, one, u, v, _config()),
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recovery", [True, False])
def test_gradient_includes_the_stop_gradient(level, recovery):
    """Against numerical differentiation of the function in which the recovery factor is a constant."""
    weight, gamma, u, v = _weight(4, 5, converged=False)
    recovered = spectral_norm_estimate(weight, u, v).item() if recovery else 1.0

    def with_constant_recovery(w, g):
        s = u @ w @ v + EPSILON
        return g * recovered * polynomial.apply(polynomial.resolve(level), w / s)

    weight.requires_grad_()
    gamma.requires_grad_()
    tolerance = {"atol": 1e-3, "rtol": 1e-4} if level == "polar_express" else {}
    assert torch.autograd.gradcheck(with_constant_recovery, (weight, gamma), **tolerance)
    output_gradient = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(with_constant_recovery(weight, gamma), (weight, gamma), output_gradient)
    actual = torch.autograd.grad(
        effective_weight(weight, gamma, u, v, _config(level, norm_recovery=recovery)), (weight, gamma), output_gradient
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    if recovery:  # control: a gradient through the recovery factor differs measurably
        s = u @ weight @ v + EPSILON
        through = gamma * s * polynomial.apply(polynomial.resolve(level), weight / s)
        (wrong,) = torch.autograd.grad(through, weight, output_gradient)
        assert (wrong - expected[0]).abs().max() > 1e-3


def test_bfloat16_products_stay_close():
    weight, gamma, u, v = _weight()
    exact = effective_weight(weight, gamma, u, v, _config())
    rounded = effective_weight(weight, gamma, u, v, _config(compute_dtype="bfloat16"))
    relative = torch.linalg.matrix_norm(rounded - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    # bf16 carries 8 bits: each of six products and constants up to 14 adds up to some 2^-8
    assert 1e-4 < relative < 0.1
