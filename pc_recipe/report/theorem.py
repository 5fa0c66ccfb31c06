"""Theorem 1 of the paper in numbers: gradient descent on a deep linear network.

The theorem: with step size 1/beta the loss falls by at least the factor 1 - mu/beta in every step, as long
as every singular value of layer l stays in [mu_l, tau_l] (the region R), where

    beta = (prod tau_l)^2 (sqrt(2 L(0)) + ||X||_F) L sigma_max(X),    mu = (prod mu_l)^2 sigma_min(X)^2.

This module computes the bound and compares it with the observed losses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """A deep linear network and its data, in float64, with the theorem's constants for a region R around its start.

    `weights[l]` is [d_{l+1}, d_l] with widths that rise and then fall (the paper's assumption 1); `inputs` X is
    [d_0, n] of full column rank (assumption 2); `labels` is [d_L, n]. In R the singular values of layer l are from
    `lower[l]`, mu_l, to `upper[l]`, tau_l.
    """

    weights: list[Tensor]
    inputs: Tensor
    labels: Tensor
    lower: list[float]
    upper: list[float]

    def loss(self, weights: Sequence[Tensor]) -> Tensor:
        """Half the squared error, summed over samples."""
        return 0.5 * (torch.linalg.multi_dot([*reversed(weights), self.inputs]) - self.labels).square().sum()

    def is_in_region(self, weights: Sequence[Tensor]) -> bool:
        """Whether finite weights are in R."""
        spectra = map(torch.linalg.svdvals, weights)
        return all(lo <= s[-1] and s[0] <= up for s, lo, up in zip(spectra, self.lower, self.upper, strict=True))

    @property
    def beta(self) -> float:
        sizes = math.sqrt(2 * self.loss(self.weights).item()) + self.inputs.norm().item()
        return math.prod(self.upper) ** 2 * sizes * len(self.weights) * torch.linalg.svdvals(self.inputs)[0].item()

    @property
    def mu(self) -> float:
        return math.prod(self.lower) ** 2 * torch.linalg.svdvals(self.inputs)[-1].item() ** 2


def make_problem(widths: Sequence[int] = (8, 12, 12, 6), samples: int = 6, seed: int = 0) -> Problem:
    """Random weights with singular values spread over [0.5, 1.5], inputs of moderate condition number.

    R extends each layer's initial spectrum by a fifth of its ends, and contains 1, as the theorem requires.

    Args:
        widths: d_0 .. d_L.
        samples: n.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = [_with_singular_values(rows, columns, (0.5, 1.5), generator) for columns, rows in zip(widths, widths[1:])]
    inputs = _with_singular_values(widths[0], samples, (0.7, 1.3), generator)
    # Labels near the initial prediction, so that training stays near the start and inside R.
    prediction = torch.linalg.multi_dot([*reversed(weights), inputs])
    noise = torch.randn(prediction.shape, generator=generator, dtype=torch.float64)
    spectra = [torch.linalg.svdvals(weight) for weight in weights]
    lower = [min(1.0, 0.8 * sigma[-1].item()) for sigma in spectra]
    upper = [max(1.0, 1.2 * sigma[0].item()) for sigma in spectra]
    return Problem(weights, inputs, prediction + 0.3 * noise / math.sqrt(noise.numel()), lower, upper)


def descend(problem: Problem, beta: float, steps: int) -> tuple[list[float], list[bool]]:
    """Gradient descent with step size 1/beta: losses after 0, 1, ... steps, and whether the weights were in R."""
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    losses, inside = [], []
    for _ in range(steps + 1):
        loss = problem.loss(weights)
        losses.append(loss.item())
        inside.append(math.isfinite(losses[-1]) and problem.is_in_region([weight.detach() for weight in weights]))
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= gradient / beta
    return losses, inside


def report(problem: Problem, losses: Sequence[float], inside: Sequence[bool]) -> str:
    """A text that says how loose the bound is."""
    steps, ratio = len(losses) - 1, problem.mu / problem.beta
    measured, promised = math.log(losses[0] / losses[-1]) / steps, -math.log1p(-ratio)
    return (
        f"inside the region R at every one of {steps} steps: {'yes' if all(inside) else 'NO'}\n"
        f"loss: {losses[0]:.4g} -> {losses[-1]:.4g}; the theorem promises at most {losses[0] * (1 - ratio) ** steps:.4g}\n"
        f"fall of log loss per step: {measured:.3g} measured, {promised:.3g} promised, "
        f"a factor of {measured / promised:.0f} between them"
    )


def _with_singular_values(rows: int, columns: int, span: tuple[float, float], generator) -> Tensor:
    shorter = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, shorter, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, shorter, generator=generator, dtype=torch.float64)).Q
    return left @ torch.diag(torch.linspace(*span, shorter, dtype=torch.float64)) @ right.T
