"""Zero, rank-deficient, huge and tiny matrices: PC is finite and correct."""

import pytest
import torch

from pc import PCConfig, effective_weight
from pc.method import method_of, power_iteration
from pc.spectral import initial_vectors

SHAPES = pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
PASSES = pytest.mark.parametrize("in_graph", [True, False])
CONFIG = PCConfig(level=4)


def evaluate(in_graph, weight, steps=10):
    """PC(W), the gradients of W and gamma for a fixed gradient of PC(W), and the vectors, in float32."""
    u, v = initial_vectors("x", weight.shape)
    gamma = torch.ones(1)
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    config = PCConfig(level=4, power_iterations=steps)
    if not in_graph:
        result, u, v, *_ = method_of(config).evaluate(weight[None], gamma[None], u[None], v[None])
        d_weight, d_gamma = method_of(config).pull_back(weight[None], gradient[None], gamma[None], u, v)
        return result[0], d_weight[0], d_gamma[0], u[0], v[0]
    u, v = power_iteration(weight, u, v, steps)
    leaves = weight.clone().requires_grad_(), gamma.requires_grad_()
    result = effective_weight(*leaves, u, v, config)
    return result.detach(), *torch.autograd.grad(result, leaves, gradient), u, v


def random(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@PASSES
@SHAPES
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_zero_and_rank_deficient(in_graph, shape, rank):
    weight = random((shape[0], max(rank, 1))) @ random((max(rank, 1), shape[1])) * (rank > 0)
    result, *others = evaluate(in_graph, weight, steps=100)
    assert all(tensor.isfinite().all() for tensor in (result, *others))
    # singular values below 1e-6 of the largest are float32 rounding errors
    sigma = torch.linalg.svdvals(result.double())
    assert (sigma > 1e-5 * sigma.max()).sum() == rank
    kept = [
        torch.allclose(*pair, rtol=0, atol=1e-6) for pair in zip(others[2:], initial_vectors("x", shape), strict=True)
    ]
    assert kept == [rank == 0] * 2  # a zero matrix leaves the vectors unchanged, up to rounding


@PASSES
@SHAPES
@pytest.mark.parametrize("exponent", [-10, 20, 40, 58])
def test_pc_of_a_multiple_is_the_multiple(in_graph, shape, exponent):
    """PC(c W) = c PC(W), with the same gradient of W, for c up to 3e17: powers of two are exact."""
    weight = random(shape)
    result, d_weight, d_gamma, u, v = evaluate(in_graph, weight)
    scaled = evaluate(in_graph, weight * 2.0**exponent)
    expected = result * 2.0**exponent, d_weight, d_gamma * 2.0**exponent, u, v
    for mine, other in zip(scaled, expected, strict=True):
        # for W / 1024 the epsilon of 1e-7 is 2e-5 of the estimate s; else rounding of float32
        assert (mine - other).norm() < (1e-3 if exponent < 0 else 1e-5) * other.norm()
