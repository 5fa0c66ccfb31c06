"""float16 factors: both passes against float64, and matrices of any size."""

import shutil

import pytest
import torch

from helpers.toy import leading_vectors
from pc import PCConfig, half, maps, polynomial
from pc.method import method_of

pytestmark = pytest.mark.fast

SHAPES = pytest.mark.parametrize("shape", [(48, 132), (132, 48), (64, 64)], ids=str)
# Rounding to float16 changes a number by up to 4.9e-4 of itself, on average by 2.8e-4 over several roundings of each product;
# larger coefficients amplify it: to 7e-4 at level 4, to 1.2e-3 at the level that CONTRIBUTING.md adds.
TOLERANCE = 1.4e-3


def _passes(weight, gradient, u, v, level=4, dtype=torch.float32, **kwargs):
    """PC(W), the gradients of W and gamma, and the kept squares."""
    method = method_of(PCConfig(level=level, **kwargs))
    gamma = torch.full((len(u), 1), 0.9, dtype=dtype)
    weight, gradient, u, v = (x.to(dtype) for x in (weight, gradient, u, v))
    effective, _, _, _, kept = method.evaluate(weight, gamma, u, v, advance=False)
    return effective, *method.pull_back(weight, gradient, gamma, u, v), kept


def _half(*given, **kwargs):
    return _passes(*given, compute_dtype="float16", **kwargs)


def _exact(*given, **kwargs):
    return _passes(*given, dtype=torch.float64, **kwargs)


def _gamma_error(found, exact, gradient):
    """Relative to the largest value of the inner product <PC(W), H>, which may cancel."""
    largest = exact[0].flatten(1).norm(dim=1) * gradient.double().flatten(1).norm(dim=1)
    return ((found.double() - exact[2])[:, 0] / largest).abs().max()


def _random(shape, seed=0):
    """W and H of three matrices, float64, with W's leading singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    weight, gradient = (torch.randn(3, *shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return weight, gradient, *leading_vectors(weight)


def _error(found, exact):
    """Of each matrix, relative to its norm."""
    found, exact = found.double().flatten(1), exact.flatten(1)
    return ((found - exact).norm(dim=1) / exact.norm(dim=1)).max()


@SHAPES
@pytest.mark.parametrize("level", [*maps.COEFFICIENTS, (1.5, -0.5, 0.25, -0.25, 0.0)], ids=str)
def test_both_passes_against_float64(shape, level):
    given = _random(shape)
    exact = _exact(*given, level=level)
    weight, gradient, u, v = given
    found = _half(*given, level=level)
    method = method_of(PCConfig(level=level, compute_dtype="float16"))
    # matrices that do not lie in one batch, and squares that the first pass has kept
    apart = [[*x.float().split(sizes)] for x, sizes in ((weight, [1, 2]), (gradient, [2, 1]))]
    again = method.pull_back(*apart, torch.full((3, 1), 0.9), u.float(), v.float(), found[-1])
    for mine, reference in zip((*found[:2], again[0]), (*exact[:2], exact[1]), strict=True):
        assert mine.dtype == torch.float32 and _error(mine, reference) < TOLERANCE
    for mine in (found[2], again[1]):
        assert _gamma_error(mine, exact, gradient) < TOLERANCE
    assert {square.dtype for square in found[-1]} == {torch.float16}
    control = _exact(weight.bfloat16(), gradient, u, v, level=level)
    assert _error(control[0], exact[0]) > TOLERANCE


@SHAPES
def test_vectors_follow_as_in_float32(shape):
    """u and v are as good: s is off by the square of their error. An estimate that is too low is replaced too."""
    weight, _, u, v = (x.float() for x in _random(shape))
    weight[1] += 2 * weight[1].norm() * torch.outer(u[0], v[0])  # a direction that u and v have not followed
    configs = [PCConfig(compute_dtype=one, power_iterations=20) for one in ("float32", "float16")]
    single, rounded = (method_of(one).evaluate(weight, torch.ones(3, 1), u, v) for one in configs)
    estimates = [torch.einsum("bn,bnm,bm->b", u, weight, v) for _, u, v, *_ in (single, rounded)]
    torch.testing.assert_close(estimates[1], estimates[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(rounded[3], single[3], rtol=1e-3, atol=0)
    assert _error(rounded[0], single[0].double()) < TOLERANCE


@SHAPES
@pytest.mark.parametrize("of_weight, of_gradient", [(1e-30, 1.0), (1e30, 1.0), (1.0, 1e-30), (1.0, 1e30), (1e-5, 1e5)])
def test_sizes_from_1e_minus_30_to_1e30(shape, of_weight, of_gradient):
    weight, gradient, u, v = _random(shape)
    given = (weight * of_weight).float(), (gradient * of_gradient).float(), u, v
    found, exact = _half(*given), _exact(*given)
    assert _error(found[0], exact[0]) < TOLERANCE and _error(found[1], exact[1]) < TOLERANCE
    # of a W / s as small as 1e-23, float16 has no digits: the gradient of gamma, smaller yet, becomes 0
    assert found[2].eq(0).all() if of_weight == 1e-30 else _gamma_error(found[2], exact, given[1]) < TOLERANCE
    assert not weight.half().mul(1e30).isfinite().all()  # control


@SHAPES
def test_zeros_and_a_mask(shape):
    weight, gradient, u, v = _random(shape)
    for given in ((0 * weight, gradient, u, v), (weight, 0 * gradient, u, v)):
        found, exact = _half(*given), _exact(*given)
        assert all(
            torch.allclose(a.double(), b, rtol=2e-3, atol=1e-3 * b.abs().max()) for a, b in zip(found[:3], exact)
        )
    weight[:, ::2] = 0  # of pruned rows
    weight[:, :, 5:9] = 0
    given = weight, gradient, *leading_vectors(weight)
    found, exact = _half(*given), _exact(*given)
    assert _error(found[0], exact[0]) < TOLERANCE and _error(found[1], exact[1]) < TOLERANCE
    assert not found[0][:, ::2].any() and not found[0][:, :, 5:9].any()


@SHAPES
def test_one_huge_entry(shape):
    weight, gradient, *_ = _random(shape)
    weight[0, 3, 4], gradient[1, 5, 6] = 1e4, 1e6
    given = weight, gradient, *leading_vectors(weight)
    found, exact = _half(*given), _exact(*given)
    assert _error(found[0], exact[0]) < TOLERANCE and _error(found[1], exact[1]) < TOLERANCE


@SHAPES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_found(shape, value):
    """In the matrix that has them, and in no other of its batch."""
    for index in (0, 1):
        given = [x.float() for x in _random(shape)]
        given[index][1, 2, 3] = value
        (effective, of_weight, of_gamma, _), plain = _half(*given), _passes(*given)
        wrong = [not x.isfinite().all() for x in (effective[1], of_weight[1], of_gamma[1])]
        assert wrong == [not x[1].isfinite().all() for x in plain[:3]] == [index == 0, True, True]
        assert all(x[::2].isfinite().all() for x in (effective, of_weight, of_gamma))


def _aligned(shape):
    """W and H whose products are large: all entries of H are its largest, and N concentrates them in one entry."""
    n, m = shape
    c = torch.full((n,), n**-0.5, dtype=torch.float64)
    c[0] += 1
    weight = torch.outer(c / c.norm(), torch.full((m,), m**-0.5, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    return 1.2 * weight[None] + 1e-3 * torch.randn(1, n, m, generator=generator), torch.ones(1, n, m).double()


@pytest.mark.parametrize(
    "coefficients", [*maps.COEFFICIENTS.values(), *maps.POLAR_EXPRESS[:2], (1.5, -0.5, 0.3, 0.2, -0.4, 0.1)]
)
def test_the_bound_of_stored_products(monkeypatch, coefficients):
    """No product that `vjp` stores is larger than `growth` says, and some are nearly as large."""
    sizes, product = [], polynomial.product
    monkeypatch.setattr(polynomial, "product", lambda *a, **k: _noted(sizes, product(*a, **k)))
    largest = 0.0
    for weight, gradient in (_aligned((48, 132)), [x[:1] for x in _random((48, 132))[:2]]):
        weight = weight / torch.linalg.matrix_norm(weight, 2) * maps.REACH
        for h in (gradient, weight):
            gram = weight @ weight.mT
            kept = [gram, *polynomial._values(coefficients, gram)]
            d = h @ weight.mT
            sizes.clear()
            part, linear = polynomial._gradient(coefficients, gram, kept[2:], d + d.mT)
            found = [(d + d.mT).norm().item(), (part + part.mT + linear * (d + d.mT)).norm().item(), *sizes]
            largest = max(largest, max(found) / h.norm().item() / maps.growth(coefficients))
    assert 0.04 < largest <= 1.0


def _noted(sizes, tensor):
    sizes.append(tensor.norm().item())
    return tensor


def test_what_is_stored_stays_below_two_to_the_fifteenth(monkeypatch):
    """Also for the largest products; control: a gradient that is merely divided by its norm would use little of the range, and
    one that is not divided leaves it."""
    seen = []
    product, round_into = polynomial.product, polynomial.round_into

    def noted(rounded, *args):
        round_into(rounded, *args)
        seen.append(rounded.abs().max().item())

    monkeypatch.setattr(polynomial, "product", lambda *a, **k: _entries(seen, product(*a, **k)))
    monkeypatch.setattr(polynomial, "round_into", noted)
    weight, gradient = _aligned((48, 132))
    given = weight, 1e4 * gradient, *leading_vectors(weight)
    exact = _exact(*given)
    seen.clear()
    assert _error(_half(*given)[1], exact[1]) < 2 * TOLERANCE
    assert 2.0**8 < max(seen) < 2.0**15
    monkeypatch.setattr(polynomial, "power_of_two", lambda norm, top: torch.ones_like(norm, dtype=torch.float32))
    assert not _half(*given)[1].isfinite().all()


def _entries(seen, tensor):
    if tensor.dtype is torch.float16:
        seen.append(tensor.abs().max().item())
    return tensor


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_compiled_functions_are_the_same():
    """On a GPU they are compiled; here for the CPU, whose compiler makes the same of their operations."""
    generator = torch.Generator().manual_seed(0)
    for size in (24, 40):
        value, square, outer, gram = (torch.randn(2, size, size, generator=generator).half() for _ in range(4))
        matrix, u, v = (torch.randn(2, *shape, generator=generator) for shape in ((size, 50), (size,), (50,)))
        number = torch.randn(2, 1, 1, generator=generator)
        for function, *given in (
            (half.add_transpose, square, value),
            (half.write_gradient, square, outer, gram, -0.6, torch.empty_like(square)),
            (half.without_rank_one, matrix, number, number, u, v),
            (half.without_rank_one, matrix.mT.contiguous(), number, number, v, u),
        ):
            plain, compiled = function(*given), function._compiled(*given)
            pairs = zip(plain, compiled, strict=True) if isinstance(plain, tuple) else [(plain, compiled)]
            for one, other in pairs:
                torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
                assert one.dtype == other.dtype
