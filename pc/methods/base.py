"""The interface of a method, with defaults that are right for any of them and fast for none."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pc.config import PCConfig
from pc.errors import UserError
from pc.polynomial import gram_matrix
from pc.spectral import initial_vectors, power_iteration, second_opinion

USE_AS_W = 'use them as W: without pc.preserve, or in the recipe by its key pc.start = "raw"'


@contextmanager
def matmul_precision(precision: str):
    """Run a GPU's float32 matmuls as "ieee" (plain float32) or "tf32", whatever the process-wide setting is.

    CPU matmuls stay float32. This changes the CUDA setting only: torch's older switch,
    `set_float32_matmul_precision`, raises an error if the user has set the new one.
    """
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = precision
    try:
        yield
    finally:
        setting.fp32_precision = before


class Method(ABC):
    """PC(W) as a function of one matrix W, of learnable gammas, and of the vectors u and v.

    u and v follow the leading singular vectors of W, or are what else a method keeps: `advance` moves them once per
    optimizer step. They are constants for the gradient. Each matrix's owner calls `write` and `pull_back` once per step
    (`pc.preconditioner`), with batches of independent matrices: W [B, n, m], gamma [B, gammas] or None for ones, u [B, n],
    v [B, m]. A `PCLinear` calls `apply` in every forward pass, and `advance`, on one matrix without B.

    Args:
        config: with one level.
    """

    uses_vectors = True
    """whether u and v are singular vectors, on which PC(W) depends"""
    reach = 1.2
    """how far the largest singular value may be above the estimate u^T W v, relative to it"""

    def __init__(self, config: PCConfig) -> None:
        self.config = config

    def count_gammas(self, rows: int) -> int:
        """How many gammas a matrix of so many rows has; they start at 1."""
        return 1

    def initial_vectors(self, name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """u [..., n] and v [..., m] before the first `advance`, for weights [..., n, m], on the CPU; by default random ones
        that depend on the weight's name."""
        return initial_vectors(name, shape)

    @abstractmethod
    def apply(self, weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
        """PC(W), [..., n, m], by operations that autograd can follow: the definition of the method."""

    @abstractmethod
    def describe(self) -> str:
        """What defines PC(W), in a few words. A saved state has them, and another method refuses it."""

    def advance(self, weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u and v after one more optimizer step, and what a second start found, relative to the estimate by the first [...]."""
        if not self.uses_vectors:
            return u, v, weight.new_zeros(weight.shape[:-2])
        u, v = power_iteration(weight, u, v, self.config.power_iterations)
        return second_opinion(weight, gram_matrix(weight), u, v, self.reach)

    @torch.no_grad()
    @matmul_precision("ieee")
    def write(
        self, weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor, advance: bool = True
    ) -> tuple[Tensor, ...]:
        """PC(W), the u and v that it was computed with, which have advanced, unless `advance` is false, and what a second start
        found [B] (`advance`).

        Any further tensors are what `pull_back` of the same W, u and v can use again; none by default.
        """
        found = weight.new_zeros(len(weight))
        if advance:
            u, v, found = self.advance(weight, u, v)
        return self.apply(weight, gamma, u, v), u, v, found

    @matmul_precision("ieee")
    def pull_back(
        self, weight: Tensor, gradient: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor, *kept: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of a loss with respect to W and gamma, given that with respect to PC(W): a vector-Jacobian
        product. By default autograd computes it from `apply`.

        Args:
            kept: the further tensors of `write`, or none, as where memory is short.

        Returns:
            [B, n, m] and, if there is a gamma, [B, gammas].
        """
        inputs = [x.detach().requires_grad_() for x in (weight, gamma) if x is not None]
        with torch.enable_grad():
            result = self.apply(inputs[0], inputs[1] if gamma is not None else None, u, v)
        return torch.autograd.grad(result, inputs, gradient)

    def invert(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """W, u and v with PC(W) = `weight` for gamma = 1.

        Raises:
            UserError: by default, as the method knows no way to find W.
        """
        raise self._no_inverse()

    def require_invertible(self) -> None:
        """Raise a `UserError` with the reason if `invert` cannot work; by default, if the method does not define it."""
        if type(self).invert is Method.invert:
            raise self._no_inverse()

    def _no_inverse(self) -> UserError:
        return UserError(f'method "{self.config.method}" cannot preserve given weights; {USE_AS_W}')
