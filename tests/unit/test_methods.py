"""The methods besides the paper's, in float64 against decompositions and sums by hand, and in a loop."""

import pytest
import torch

import pc
from helpers.toy import InGraph, Loop, leading_vectors, require_near, toy_batch, toy_loss, toy_model
from pc import PCConfig, UserError
from pc.methods import method_of

SHAPES = pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (1, 6)], ids=str)
GAMMA = pytest.mark.parametrize("with_gamma", [True, False])
METHODS = pytest.mark.parametrize("method", ["row_norm", "cap"])


def _batch(shape, gammas):
    """W [3, n, m], gamma [3, gammas], u, v and a gradient, no two matrices of one norm."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    weight = draw(3, *shape) * torch.tensor([3.0, 0.02, 1.0], dtype=torch.float64)[:, None, None]
    return weight, 0.7 + draw(3, gammas).square(), *leading_vectors(weight), draw(3, *shape)


def _both_passes(method, weight, gamma, u, v, gradient, **settings):
    made = method_of(PCConfig(method=method, blocks=("o",), **settings))
    return made.write(weight, gamma, u, v)[0], *made.pull_back(weight, gradient, gamma, u, v)


@SHAPES
@GAMMA
@pytest.mark.parametrize("recovery", [True, False])
def test_row_norm_is_weight_normalisation(shape, with_gamma, recovery):
    weight, gamma, u, v, gradient = _batch(shape, shape[0])
    lengths = 0.5 + u.square()
    given = gamma if with_gamma else None
    found = _both_passes("row_norm", weight, given, lengths, v, gradient, norm_recovery=recovery)
    for i in range(3):
        for row in range(shape[0]):
            size = lengths[i, row] if recovery else 1.0
            w, h, g = weight[i, row], gradient[i, row], gamma[i, row] if with_gamma else 1.0
            direction = w / w.norm()
            expected = g * size * direction, g * size / w.norm() * (h - (h @ direction) * direction)
            for mine, wanted in zip(found, expected, strict=False):
                torch.testing.assert_close(mine[i, row], wanted, rtol=1e-12, atol=1e-12)
            if with_gamma:
                torch.testing.assert_close(found[2][i, row], size * (h @ direction), rtol=1e-12, atol=1e-12)
    assert (found[0] - weight).abs().max() > 0.1  # control: rows do not keep their norm


def test_row_norm_starts_from_w_and_keeps_its_lengths():
    """Whatever the length of W becomes. A row that starts at zero is trained, and gets its length with its first step."""
    model = toy_model()
    weight = model[0].attention["wo"].weight
    with torch.no_grad():
        weight[0] = 0.0
    first = weight.detach().clone()
    pc.attach(model, PCConfig(method="row_norm", learnable_gamma=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preconditioner = pc.precondition(model, optimizer)
    torch.testing.assert_close(weight, first, rtol=1e-14, atol=0)
    lengths = []
    for step in range(3):
        toy_loss(model, toy_batch(step)).backward()
        preconditioner.pull_back()
        optimizer.step()
        optimizer.zero_grad()
        lengths.append(weight.detach().norm(dim=1))
    expected = torch.cat([lengths[0][:1], first[1:].norm(dim=1)])
    for found in lengths:
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    orig = preconditioner.weights["0.attention.wo"].orig.norm(dim=1)
    assert expected[0] > 1e-3 and (orig[1:] / expected[1:] - 1).min() > 1e-4  # controls: steps made W longer


def test_row_norm_starts_from_plain_weights_that_are_loaded_late():
    """Into a model whose first weights already had a preconditioner."""
    loop = Loop(method="row_norm")
    plain = {name: 3 * tensor for name, tensor in toy_model().state_dict().items()}
    loop.model.load_state_dict(plain, strict=False)
    loop.preconditioner.restart()
    effective = pc.plain_state_dict(loop.model)
    for name, tensor in plain.items():
        torch.testing.assert_close(effective[name], tensor, rtol=1e-14, atol=0)


@SHAPES
@GAMMA
@pytest.mark.parametrize("cap", [1.0, 0.06])
def test_cap_is_that_of_the_singular_values(shape, with_gamma, cap):
    """And the gradient is that through a decomposition. The composite polynomial is exact to 1e-6."""
    weight, gamma, u, v, gradient = _batch(shape, 1)
    given = gamma if with_gamma else None
    found = _both_passes("cap", weight, given, u, v, gradient, cap=cap)
    leaves = [x.clone().requires_grad_() for x in (weight, given) if x is not None]
    left, sigma, right = torch.linalg.svd(leaves[0], full_matrices=False)
    effective = (left * sigma.clamp(max=cap)[:, None]) @ right
    if with_gamma:
        effective = effective * leaves[1][..., None]
    for mine, wanted in zip(found, (effective, *torch.autograd.grad(effective, leaves, gradient)), strict=True):
        for one, other in zip(mine, wanted, strict=True):  # relative to each matrix, however small
            assert (one - other).abs().max() < 1e-6 * other.abs().max()
    assert sigma.max() > 2 * cap and (sigma.min() < cap)  # control: there is something to cap, and to leave


@pytest.mark.parametrize("largest, error", [(0.5, 1e-6), (1.1, 4e-6), (10.0, 3e-4), (100.0, 3e-2)])
def test_every_singular_value_by_the_norm(largest, error):
    """Relative to each, however small. In float32 also the rounding of the largest, and of its square beside the cap's."""
    left, _, right = torch.linalg.svd(_batch((64, 96), 1)[0][0], full_matrices=False)
    near_cap = 1 - torch.logspace(-6, -0.8, 32, dtype=torch.float64)
    sigma = torch.cat([torch.logspace(-3, 0, 32, dtype=torch.float64) * largest, near_cap[near_cap < largest]])
    size = len(sigma)
    weight = ((left[:, :size] * sigma) @ right[:size])[None]
    method = method_of(PCConfig(method="cap", cap=1.0, blocks=("o",)))
    for dtype, rounding in ((torch.float64, 1e-9), (torch.float32, 3e-7 * max(1.0, largest))):
        given, *vectors = (x.to(dtype) for x in (weight, left[:, 31][None], right[31][None]))
        found = method.write(given, None, *vectors)[0][0].double()
        found = (left.mT @ found @ right.mT).diagonal()[:size]
        torch.testing.assert_close(found, sigma.clamp(max=1.0), rtol=error, atol=rounding)


@METHODS
def test_bfloat16_weights_give_what_their_float32_ones_do(method):
    """As a trainer with mixed precision has them in the graph."""
    weight, _, u, v, _ = _batch((24, 16), 1)
    config = PCConfig(method=method, blocks=("o",))
    given = [x.bfloat16() for x in (weight, torch.ones(3, method_of(config).count_gammas(24)), u, v)]
    found, wanted = (pc.effective_weight(*tensors, config) for tensors in (given, [x.float() for x in given]))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2**-6, atol=2**-8 * wanted.abs().max())  # some roundings


@METHODS
def test_a_loop_trains_what_layers_in_the_graph_do(method):
    settings = {"method": method, "cap": 0.4, "make": lambda p: torch.optim.SGD(p, lr=0.5)}
    loop, reference = Loop(**settings), InGraph(**settings)
    for step in range(4):
        for each in (loop, reference):
            each.step(step)
    # float64 rounding, which the composite's slope of 2e4 amplifies
    require_near(loop.trained(), reference.trained(), 1e-9)
    for orig, gamma in loop.trained().values():
        assert (gamma != 1).all() and len(gamma) == (len(orig) if method == "row_norm" else 1)


def test_identity_and_sigma_reparametrisation_are_maps():
    """W / sigma_1 times gamma (Zhai et al., arXiv:2303.06296), and W with a gradient that leaves the norm alone."""
    weight, gamma, u, v, gradient = _batch((6, 9), 1)
    largest = torch.linalg.matrix_norm(weight, 2, keepdim=True)
    for recovery, factor in ((False, 1 / largest), (True, 1.0)):
        config = PCConfig(level=[1.0, 0.0], norm_recovery=recovery, blocks=("o",))
        found = pc.effective_weight(weight, gamma, u, v, config)
        torch.testing.assert_close(found, gamma[..., None] * weight * factor, rtol=1e-5, atol=0)  # epsilon by 0.1
        d_weight, _ = method_of(config).pull_back(weight, gradient, gamma, u, v)
        along = torch.einsum("bij,bij->b", d_weight, weight) / (d_weight.norm(dim=(1, 2)) * weight.norm(dim=(1, 2)))
        assert along.abs().max() < 1e-5  # a change of the length of W changes nothing


def test_what_a_method_cannot_do_is_refused():
    for settings in ({"method": "cap"}, {"method": "row_norm", "norm_recovery": False}):
        with pytest.raises(UserError, match=f'method "{settings["method"]}" cannot preserve given weights'):
            pc.preserve(pc.attach(toy_model(), PCConfig(**settings)))
    with pytest.raises(UserError, match="pc.cap must be above 0"):
        PCConfig(method="cap", cap=0.0)
