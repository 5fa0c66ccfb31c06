"""Theorem 1 of the paper in numbers: gradient descent on a deep linear network.

The theorem: with step size 1/beta the loss falls by at least the factor 1 - mu/beta in every step, as long
as every singular value of layer l stays in [mu_l, tau_l] (the region R), where

    beta = (prod tau_l)^2 (sqrt(2 L(0)) + ||X||_F) L sigma_max(X),    mu = (prod mu_l)^2 sigma_min(X)^2.

This module computes the bound and compares it with the observed losses. It also runs the same problem with PC in every
layer and the same step size, which the theorem does not cover.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from pc.common.plots import save, subplots
from pc.config import PCConfig
from pc.errors import UserError
from pc.linear import effective_weight


@dataclass(frozen=True)
class Problem:
    """A deep linear network and its data, in float64.

    `weights[l]` is [d_{l+1}, d_l] with widths that rise and then fall; `inputs` X is [d_0, n] of full
    column rank; `labels` is [d_L, n].
    """

    weights: list[Tensor]
    inputs: Tensor
    labels: Tensor

    def loss(self, weights: Sequence[Tensor]) -> Tensor:
        """Half the squared error, summed over samples."""
        return 0.5 * (_predict(weights, self.inputs) - self.labels).square().sum()


@dataclass(frozen=True)
class Bound:
    """The theorem's bound for a problem and a region."""

    lower: list[float]
    """mu_l: smallest singular value allowed in layer l."""
    upper: list[float]
    """tau_l: largest singular value allowed in layer l."""
    beta: float
    mu: float

    @property
    def step_size(self) -> float:
        return 1.0 / self.beta

    @property
    def contraction(self) -> float:
        """Upper bound of the ratio of the loss from one step to the next."""
        return 1.0 - self.mu / self.beta


@dataclass(frozen=True)
class Descent:
    """Record of gradient descent; index t is the state after t steps."""

    losses: list[float]
    in_region: list[bool]
    """Whether the raw weights were in R."""


def make_problem(widths: Sequence[int] = (8, 12, 12, 6), samples: int = 6, seed: int = 0) -> Problem:
    """Random weights with singular values spread over [0.5, 1.5], inputs of moderate condition number.

    Args:
        widths: d_0 .. d_L, rising and then falling (the paper's assumption 1).
        samples: n, at most d_0 (assumption 2).
    """
    peak = max(range(1, len(widths)), key=lambda i: widths[i], default=0)  # r of the paper is at least 1: d_0 <= d_1
    rising, falling = list(widths[: peak + 1]), list(widths[peak:])
    if len(widths) < 2 or rising != sorted(rising) or falling != sorted(falling, reverse=True):
        raise UserError(
            f"widths {tuple(widths)} should rise, or stay, from the first to the second and fall at the end at most "
            "(assumption 1 of the paper)"
        )
    if samples > widths[0]:
        raise UserError(f"samples = {samples} should be at most the input width {widths[0]} (assumption 2)")
    generator = torch.Generator().manual_seed(seed)
    weights = [_with_singular_values(rows, columns, (0.5, 1.5), generator) for columns, rows in zip(widths, widths[1:])]
    inputs = _with_singular_values(widths[0], samples, (0.7, 1.3), generator)
    # Labels near the initial prediction, as training from here stays near the start and so inside R.
    prediction = _predict(weights, inputs)
    noise = torch.randn(prediction.shape, generator=generator, dtype=torch.float64)
    return Problem(weights, inputs, prediction + 0.3 * noise / math.sqrt(noise.numel()))


def bound(problem: Problem, slack: float = 0.2) -> Bound:
    """The theorem's constants for the region that extends each layer's initial spectrum by `slack`.

    The region is [(1 - slack) sigma_min, (1 + slack) sigma_max], widened to contain 1, as the theorem requires.
    """
    lower, upper = [], []
    for weight in problem.weights:
        sigma = torch.linalg.svdvals(weight)
        lower.append(min(1.0, (1 - slack) * sigma[-1].item()))
        upper.append(max(1.0, (1 + slack) * sigma[0].item()))
    sigma = torch.linalg.svdvals(problem.inputs)
    initial = problem.loss(problem.weights).item()
    sizes = math.sqrt(2 * initial) + problem.inputs.norm().item()
    beta = math.prod(upper) ** 2 * sizes * len(problem.weights) * sigma[0].item()
    return Bound(lower, upper, beta, math.prod(lower) ** 2 * sigma[-1].item() ** 2)


def in_region(weights: Sequence[Tensor], region: Bound) -> bool:
    """Whether every layer's singular values lie between its bounds."""
    if not all(weight.isfinite().all() for weight in weights):
        return False
    spectra = map(torch.linalg.svdvals, weights)
    return all(lo <= s[-1] and s[0] <= up for s, lo, up in zip(spectra, region.lower, region.upper, strict=True))


def descend(problem: Problem, region: Bound, steps: int, level: int | None = None) -> Descent:
    """Gradient descent with step size 1/beta.

    Args:
        level: None trains the weights themselves. With a PC level, W is trained and PC(W) used in its place, with exact
            singular vectors for the estimate, norm recovery and no gamma.

    Raises:
        UserError: fewer than one step.
    """
    if steps < 1:
        raise UserError(f"--steps {steps}: should be 1 or more, because the fall of the loss per step is reported")
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    losses, inside = [], []
    for _ in range(steps + 1):
        used = weights if level is None else [_preconditioned(weight, level) for weight in weights]
        loss = problem.loss(used)
        losses.append(loss.item())
        inside.append(in_region([weight.detach() for weight in weights], region))
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= region.step_size * gradient
    return Descent(losses, inside)


def kernel_eigenvalues(problem: Problem, weights: Sequence[Tensor]) -> tuple[float, float]:
    """Smallest and largest eigenvalue of the tangent kernel G^T G, which mu and beta bound from outside."""
    jacobians = torch.autograd.functional.jacobian(lambda *ws: _predict(ws, problem.inputs).flatten(), tuple(weights))
    stacked = torch.cat([jacobian.flatten(1) for jacobian in jacobians], dim=1)  # [n d_L, parameters]
    sigma = torch.linalg.svdvals(stacked)
    return sigma[-1].item() ** 2, sigma[0].item() ** 2


def report(problem: Problem, region: Bound, plain: Descent, with_pc: Descent, level: int) -> str:
    """A text on how loose the bound is."""
    steps = len(plain.losses) - 1
    smallest, largest = kernel_eigenvalues(problem, problem.weights)
    measured = _mean_log_rate(plain)
    promised = -math.log1p(-region.mu / region.beta)
    lines = [
        f"beta = {region.beta:.4g} (step size {region.step_size:.3g}), mu = {region.mu:.4g}, "
        f"beta/mu = {region.beta / region.mu:.3g}",
        f"inside the region R at every one of {steps} steps: {'yes' if all(plain.in_region) else 'NO'}",
        f"loss: {plain.losses[0]:.4g} -> {plain.losses[-1]:.4g}; the theorem promises at most "
        f"{plain.losses[0] * region.contraction**steps:.4g}",
        f"fall of log loss per step: {measured:.3g} measured, {promised:.3g} promised, "
        f"a factor of {measured / promised:.0f} between them",
        f"tangent kernel at the start: smallest eigenvalue {smallest:.3g} where the theorem uses "
        f"mu = {region.mu:.3g}; largest {largest:.3g} where it uses beta = {region.beta:.3g}",
        f"with PC level {level} and the same step size: {with_pc.losses[0]:.4g} -> {with_pc.losses[-1]:.4g} "
        f"(log loss falls {_mean_log_rate(with_pc):.3g} per step). Not covered by the theorem: the step size "
        "is that of the plain network, and PC starts from another function.",
    ]
    return "\n".join(lines)


def plot(region: Bound, plain: Descent, with_pc: Descent, level: int, output: Path) -> Path:
    """Loss against steps with the bound, and the fall per step with the promised one."""
    steps = range(len(plain.losses))
    figure, (left, right) = subplots(1, 2, width=4.2)
    left.plot([loss / plain.losses[0] for loss in plain.losses], label="gradient descent")
    left.plot([region.contraction**t for t in steps], "k--", label="bound of theorem 1")
    left.plot([loss / with_pc.losses[0] for loss in with_pc.losses], label=f"with PC level {level} (no theorem)")
    left.set_yscale("log")
    left.set_ylim(bottom=1e-20)
    left.set_ylabel("loss / initial loss")
    right.plot(_falls(plain), label="gradient descent")
    right.axhline(1 - region.contraction, color="k", linestyle="--", label=r"promised: $\mu/\beta$")
    right.plot(_falls(with_pc), label=f"with PC level {level} (no theorem)")
    right.set_yscale("log")
    right.set_ylabel("relative fall of the loss per step")
    for axes in (left, right):
        axes.set_xlabel("gradient descent step")
    left.legend()
    return save(figure, output / "theorem")


def _falls(descent: Descent) -> list[float]:
    """Relative fall of the loss in each step, as far down as float64 resolves it."""
    smallest = 1e-20 * descent.losses[0]
    return [1 - after / before for before, after in pairwise(descent.losses) if after > smallest]


def _mean_log_rate(descent: Descent) -> float:
    """Mean fall of the logarithm of the loss per step, while float64 resolves it."""
    steps = len(_falls(descent))
    return math.log(descent.losses[0] / descent.losses[steps]) / steps


def _preconditioned(weight: Tensor, level: int) -> Tensor:
    u, _, vt = torch.linalg.svd(weight.detach(), full_matrices=False)
    return effective_weight(weight, None, u[:, 0], vt[0], PCConfig(level=level, learnable_gamma=False))


def _predict(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    for weight in weights:
        inputs = weight @ inputs
    return inputs


def _with_singular_values(rows: int, columns: int, span: tuple[float, float], generator) -> Tensor:
    shorter = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, shorter, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, shorter, generator=generator, dtype=torch.float64)).Q
    return left @ torch.diag(torch.linspace(*span, shorter, dtype=torch.float64)) @ right.T
