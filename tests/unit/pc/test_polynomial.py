import pytest
import torch

from pc import maps, polynomial
from pc.maps import stages

pytestmark = pytest.mark.fast

LEVELS = [*maps.LEVELS]


def _matrix(n, m, batch=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(*batch, n, m, generator=generator, dtype=torch.float64)
    return matrix / torch.linalg.matrix_norm(matrix, 2)[..., None, None]


@pytest.mark.parametrize("level", [*LEVELS, (1.5, -0.5)])
def test_maps_are_bounded_up_to_their_reach_and_keep_one(level):
    """A level is not checked where it is used, as own coefficients are."""
    (_, map), reach = maps.resolve(level), maps.resolve(level).reach
    values = [maps.evaluate(map, reach * i / 1000) for i in range(1001)]
    assert -0.05 <= min(values) and max(values) < 1.26
    assert maps.evaluate(map, 1.0) == pytest.approx(1.0, abs=1e-3)
    assert level != "polar_express" or abs(maps.evaluate(map, 1.2)) > 1.26  # control


def test_polar_express_flattens_nearly_everything():
    sigma = torch.linspace(0.01, 1.0, 1000, dtype=torch.float64)
    flat = maps.evaluate(maps.POLAR_EXPRESS, sigma)
    # as published: any of the 24 coefficients changed by 1 % changes this mean by 4e-5 of itself or more
    assert (flat - 1).abs().mean().item() == pytest.approx(3.53829475e-4, rel=1e-5)
    # Control: the strongest level keeps the small ones small.
    assert maps.evaluate(maps.COEFFICIENTS[4], sigma).min() < 0.05


def _apply_by_horner(map, matrix):
    """Horner's rule in `G` (paper, appendix "Tricks for Matrix Polynomial Calculation")."""
    for coefficients in maps.stages(map):
        tall = matrix.size(-2) > matrix.size(-1)
        gram = polynomial.gram_matrix(matrix)
        identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
        value = coefficients[-1] * gram + coefficients[-2] * identity
        for a in reversed(coefficients[:-2]):
            value = value @ gram + a * identity
        matrix = matrix @ value if tall else value @ matrix
    return matrix


OWN = [tuple(0.5**i for i in range(degree + 1)) for degree in (5, 6, 7)]
TINY_LAST = [(1.5, -0.5, 0.25, -0.25, a) for a in (0.0, 1e-9)]  # no square can be completed


@pytest.mark.parametrize("level", [*LEVELS, *OWN, *TINY_LAST], ids=str)
@pytest.mark.parametrize("shape", [(7, 7), (5, 11), (11, 5), (1, 6), (6, 1), (2, 3, 5, 9)])
def test_fewer_products_give_the_same_as_horner_and_autograd(level, shape):
    """For the levels, and for maps that only a custom config has."""
    map = level if isinstance(level, tuple) else maps.LEVELS[level]
    *batch, n, m = shape
    matrix, gradient = _matrix(n, m, batch=batch).requires_grad_(), _matrix(n, m, batch=batch, seed=1)
    reference = _apply_by_horner(map, matrix)
    expected = torch.autograd.grad(reference, matrix, gradient, retain_graph=True)[0]
    through_apply = torch.autograd.grad(polynomial.apply(map, matrix), matrix, gradient)[0]
    with torch.no_grad():
        value = polynomial.apply(map, matrix)
        actual, inner_product, _ = polynomial.vjp(stages(map), matrix, gradient)
        _, kept = polynomial.apply_and_keep(stages(map), matrix)
        with_kept, *_ = polynomial.vjp(stages(map), matrix, gradient, kept=kept)
        wrong, *_ = polynomial.vjp(stages(map), matrix, gradient + 1e-6 * matrix)
    # Float64 rounding, and the composite's slope of 2e3 at zero.
    tolerance = 1e-11 * max(1.0, expected.abs().max())
    torch.testing.assert_close(value, reference, rtol=0, atol=1e-11)
    torch.testing.assert_close(through_apply, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    assert torch.equal(with_kept, actual)
    torch.testing.assert_close(inner_product, (reference * gradient).sum((-2, -1)), rtol=0, atol=1e-11)
    assert (wrong - expected).abs().max() > 10 * tolerance  # control
