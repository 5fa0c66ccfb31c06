"""PC(W) and its gradients compared with their definitions in float64, for weights of any split and sharding."""

from collections.abc import Callable

import torch
from torch import Tensor

from pc import maps
from pc.layer import effective_weight
from pc.weight import gamma_values


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, in float64."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).double()


def _matrices(weight, stored: list[Tensor], gammas: list[Tensor]) -> list[tuple]:
    """For each part of a weight its config, then its matrices of tensors stored as the weight is, values of tensors stored
    as gamma is, u and v."""
    split = weight.split
    gammas = [gamma_values(split, weight.effective, gamma) for gamma in gammas]
    stored, gammas, (u, v) = (
        [whole(t) if split.stack else whole(t)[None] for t in some] for some in (stored, gammas, (weight.u, weight.v))
    )
    *_, of_u, of_v = split.split_vectors(gammas[0], u, v)
    of_gammas = [split.split_vectors(gamma, u, v)[0] for gamma in gammas]
    parts = zip(*map(split.split_weight, stored), *of_gammas, of_u, of_v, strict=True)
    return [(part.config, *matrices) for part, matrices in zip(split.chosen, parts, strict=True)]


def require_pc(weight) -> None:
    """`weight` = PC(W) of level 4 by a singular value decomposition of each matrix, with s = u^T W v."""
    for _, after, before, scale, left, right in _matrices(weight, [weight.effective, weight.orig], [weight.gamma]):
        s = torch.einsum("bn,bnm,bm->b", left, before, right)[:, None]
        x, sigma, yh = torch.linalg.svd(before, full_matrices=False)
        assert (s < 1.0001 * sigma[:, :1]).all() and (s > 0.85 * sigma[:, :1]).all()  # ten power iterations per step
        values = scale * s * maps.evaluate(maps.LEVELS[4], sigma / s)
        wanted = x @ (values[..., None] * yh)
        # float32 sums; control: W itself is far away
        assert (after - wanted).norm() < 1e-5 * wanted.norm() < 1e-2 * (after - before).norm()


def require_gradients(preconditioner, pull_back: Callable[[], None]) -> None:
    """Call `pull_back`, and compare what it gives as gradients of W and gamma with those of `pc.PCLinear`'s weight."""
    used = [w for w in preconditioner.weights.values() if w.effective.grad is not None]
    gradients = [whole(w.effective.grad) for w in used]
    pull_back()
    for weight, gradient in zip(used, gradients, strict=True):
        tensors = [weight.orig, gradient, weight.orig.grad], [weight.gamma, weight.gamma.grad]
        for config, before, out, found, gamma, found_gamma, u, v in _matrices(weight, *tensors):
            before.requires_grad_(), gamma.requires_grad_()
            effective = effective_weight(before, gamma, u, v, config)
            wanted, wanted_gamma = torch.autograd.grad(effective, (before, gamma), out)
            # float32 sums; control: the gradient of PC(W) itself, unless it is zero, as of an expert without tokens
            error = (found - wanted).norm() / wanted.norm().clamp_min(1e-30)
            # relative to the sum's largest value, because q and k that are normalised later have a gradient of gamma of 0
            error_gamma = (found_gamma - wanted_gamma).norm() / (out.norm() * effective.norm()).clamp_min(1e-30)
            assert error < 1e-4 and error_gamma < 1e-6, f"{weight.name}, {config.blocks}: {error:.1e} {error_gamma:.1e}"
            assert not out.any() or (found - out).norm() > 1e-2 * out.norm()
