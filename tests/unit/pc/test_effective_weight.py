import pytest
import torch

from helpers.toy import leading_vectors
from pc import PCConfig, effective_weight, maps
from pc.method import power_iteration, spectral_norm_estimate

pytestmark = pytest.mark.fast

LEVELS = [*maps.LEVELS]


def _config(level=4, **kwargs):
    return PCConfig(level=level, blocks=("o",), **kwargs)


def _weight(n=6, m=9, batch=(), converged=True):
    generator = torch.Generator().manual_seed(0)
    weight, u, v = (
        torch.randn(*batch, *shape, generator=generator, dtype=torch.float64) for shape in ((n, m), (n,), (m,))
    )
    gamma = 0.7 + torch.rand(*batch, 1, generator=generator, dtype=torch.float64)
    vectors = leading_vectors(weight) if converged else power_iteration(weight, u, v, 2)
    return 3.0 * weight, gamma, *vectors


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recovery, with_gamma", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (1, 6)])
def test_singular_values_are_mapped(level, recovery, with_gamma, shape):
    """PC(W) = gamma s U g(sigma / s) V^T for a batch, by a singular value decomposition, even before s has converged."""
    # the composite diverges above sigma / s = 1.11, which two iterations on a small matrix exceed
    weight, gamma, u, v = _weight(*shape, batch=(3,), converged=level == "polar_express")
    config = _config(level, norm_recovery=recovery, learnable_gamma=with_gamma)
    effective = effective_weight(weight, gamma if with_gamma else None, u, v, config)
    s = spectral_norm_estimate(weight, u, v)[:, None]
    left, sigma, right = torch.linalg.svd(weight, full_matrices=False)
    mapped = maps.evaluate(maps.LEVELS[level], sigma / s) * (s if recovery else 1.0)
    expected = left @ torch.diag_embed(mapped * (gamma if with_gamma else 1.0)) @ right
    # relative to the largest: float64 rounding, times the composite's slope of about 2e3 at zero
    tolerance = 1e-10 if level == "polar_express" else 1e-12
    assert (effective - expected).abs().max() < tolerance * expected.abs().max()
