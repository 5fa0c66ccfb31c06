"""`AdamH` and `MuonH`: Adam and Muon on weights of constant norm (Hyperball, Wen et al., arXiv:2606.16899).

    W <- R normalize(W - lr R normalize(U))        R: the Frobenius norm of W; U: the update of Adam or Muon

So lr is the length of a step relative to the weight. There is no weight decay, because the norm is fixed.
Give vectors, embeddings and head to another optimizer, as the recipe does. A weight that starts at zero raises an error: it
would stay there. The norm is that of a stored matrix, even if it holds q, k and v together.
Checked against the authors' article (docs/method.md).
"""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pc.errors import UserError
from pc.optim.muon import Muon
from pc.shards import is_stack, local, on_any_rank, sharded_dims


class Hyperball(torch.optim.Optimizer):
    """A mixin, listed first among the bases, for an optimizer whose update of a weight does not depend on the weight,
    apart from its decay.
    """

    takes_matrices_alone = True
    """Read by `pc.followed`: no gamma may join."""

    _has_no_zero = False
    """Whether a step has found, on all ranks, that no matrix is zero."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim not in (2, 3):
                raise ValueError(f"{type(self).__name__} needs matrices or stacks of them, not {[*parameter.shape]}")
            if parameter.dtype.itemsize < 4:
                raise UserError(
                    f"{type(self).__name__} cannot keep the norms of {parameter.dtype} weights; call model.float(), and use "
                    "autocast or FSDP's mixed precision for fast matmuls"
                )
        self._has_no_zero = False

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        weights, rates = [weight for weight, _ in given], [lr for _, lr in given]
        shards = [local(weight) for weight in weights]
        before, radii = [shard.clone() for shard in shards], matrix_norms(weights)
        if not self._has_no_zero and any(rates):  # only then, as it waits for the device
            self._require_nonzero()
        try:
            for shard in shards:
                shard.zero_()
            # From zero, the parent's step leads to exactly -lr U, without decay. `Optimizer` wraps each class's `step` to
            # run hooks: unwrap the parent's, or hooks, PC's too, would run twice.
            inspect.unwrap(super(Hyperball, type(self)).step)(self)  # type: ignore[call-arg]
            for shard, start, lr, radius, length in zip(
                shards, before, rates, radii, matrix_norms(weights), strict=True
            ):
                shard.mul_(lr * _ratio(radius, length)).add_(start)  # the shard was -lr U, and length is lr |U|
            for shard, radius, length in zip(shards, radii, matrix_norms(weights), strict=True):
                shard.mul_(_ratio(radius, length))
        except BaseException:  # also Ctrl-C in a notebook: the weights are in `before` alone
            for shard, start in zip(shards, before, strict=True):
                shard.copy_(start)
            raise
        return loss

    def _require_nonzero(self) -> None:
        weights = [p for group in self.param_groups for p in group["params"] if p.requires_grad or p.grad is not None]
        are_zero = torch.stack([(norms == 0).any() for norms in matrix_norms(weights)])
        for weight, is_zero in zip(weights, on_any_rank(are_zero, weights).tolist(), strict=True):
            if is_zero:
                raise UserError(
                    f"{type(self).__name__} keeps the norm of each matrix, and one in a weight of shape {[*weight.shape]} is "
                    "zero, so it would never train; start from other values, or give it to another optimizer"
                )
        self._has_no_zero = True


class AdamH(Hyperball, torch.optim.Adam):
    """Adam on matrices of constant Frobenius norm (Hyperball, Wen et al., arXiv:2606.16899):

        W <- R normalize(W - lr R normalize(U))        R: the norm of W; U: the update of Adam

    Options are those of `torch.optim.Adam`; weight decay has no effect. `lr` is the length of a step relative to W.
    Parameters are matrices [n, m] or stacks [E, n, m] of them, plain or sharded; another optimizer trains the rest.

    Raises:
        ValueError: a parameter that is neither a matrix nor a stack.
        UserError: a parameter is not float32 or float64, or a matrix is zero at the first step that would move it.
    """


class MuonH(Hyperball, Muon):
    """Muon on matrices of constant Frobenius norm (Hyperball, Wen et al., arXiv:2606.16899):

        W <- R normalize(W - lr R normalize(U))        R: the norm of W; U: the update of Muon

    Options are those of `pc.Muon`; weight decay has no effect. `lr` is the length of a step relative to W.
    Parameters are matrices [n, m] or stacks [E, n, m] of them, plain or sharded; another optimizer trains the rest.

    Raises:
        ValueError: a parameter that is neither a matrix nor a stack.
        UserError: a parameter is not float32 or float64, or a matrix is zero at the first step that would move it.
    """


def matrix_norms(weights: Sequence[Tensor]) -> list[Tensor]:
    """The Frobenius norm of every matrix that this rank holds rows or columns of, in float64: [1, 1], of
    stacks [E, 1, 1].

    Weights may be sharded in any way. One all-reduce for each mesh dimension that splits matrices.
    """
    squares = [
        torch.linalg.vector_norm(local(w), dim=(-2, -1), keepdim=True, dtype=torch.float64) ** 2 for w in weights
    ]
    of_groups: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for index, weight in enumerate(weights):
        for dimension, dim in sharded_dims(weight).items():
            if isinstance(weight, DTensor) and (dim != 0 or not is_stack(weight)):
                of_groups[weight.device_mesh.get_group(dimension)].append(index)
    for group, indices in of_groups.items():
        flat = torch.cat([squares[index].flatten() for index in indices])
        dist.all_reduce(flat, group=group)
        for index, part in zip(indices, flat.split([squares[i].numel() for i in indices]), strict=True):
            squares[index] = part.view_as(squares[index])
    return [square.sqrt() for square in squares]


def _ratio(length: Tensor, of: Tensor) -> Tensor:
    """0 where `of` is 0: there is nothing to scale."""
    return torch.where(of > 0, length / of, 0.0)
