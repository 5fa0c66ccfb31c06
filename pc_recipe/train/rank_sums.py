"""What ranks tell each other in a step, in two exchanges, for each of which the host waits once.

every step              before the update: gradient norm, whether it is finite, wishes (`agree`)
steps that are logged   after it: loss, sizes, times and so on, by name (`RankNumbers`)
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pc.shards import local, sharded_dims
from pc.targets import clean_name


def share_of(tensor: Any, ranks: int) -> float:
    """The factor of each rank's shard in a sum over all `ranks`: 1 / k if k ranks hold the same shard.

    For example, 8 ranks hold a tensor as 4 shards, each twice: 4 / 8.
    """
    return math.prod(tensor.device_mesh.size(d) for d in sharded_dims(tensor)) / ranks


class SquaredNorm:
    """This rank's part of squared norms over all parameters of a model, in a few operations however many they are.

    Create it while FSDP has the parameters sharded.

    Args:
        model_parts: this rank's.
        ranks: those of one pipeline stage.
    """

    def __init__(self, model_parts: Sequence[nn.Module], ranks: int) -> None:
        self._by_share: dict[float, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter in chain(*(model.named_parameters() for model in model_parts)):
            self._by_share[share_of(parameter, ranks)].append((clean_name(name), parameter))

    def gradients(self) -> list[Tensor]:
        """This rank's shards of all gradients."""
        return list(chain(*(tensors for _, tensors in self._shards(_gradient))))

    @torch.no_grad()
    def of_gradients(self) -> Tensor:
        """A scalar on the device."""
        return self._sum(_gradient)

    @torch.no_grad()
    def of_parameters(self, without: set[str]) -> Tensor:
        """In float64, because torch's float32 norm of many numbers is 1e-4 too small on a CPU.

        Args:
            without: names of parameters that are left out.
        """
        return self._sum(lambda name, parameter: None if name in without else parameter, torch.float64)

    def _shards(self, of: Callable) -> Iterator[tuple[float, list[Tensor]]]:
        for share, parameters in self._by_share.items():
            tensors = [of(*named) for named in parameters]
            yield share, [local(tensor) for tensor in tensors if tensor is not None]

    def _sum(self, of: Callable, dtype: torch.dtype | None = None) -> Tensor:
        norms = [(share, torch._foreach_norm(tensors, 2, dtype)) for share, tensors in self._shards(of) if tensors]
        # The norm of norms, as torch does to clip gradients, so that both round alike.
        squares = [torch.linalg.vector_norm(torch.stack(each)).square() * share for share, each in norms]
        return functools.reduce(torch.add, squares)


def _gradient(_: str, parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


class Agreement(NamedTuple):
    """What all ranks agree on before an update."""

    norm: Tensor
    """of the gradients, a scalar on the device"""
    is_finite: bool
    """whether the squared gradient norm and the loss of every rank are"""
    wishes: list[bool]
    """for each, whether any rank has it"""
    logged_norm: float
    """the same as `norm`, on the host"""


@torch.no_grad()
def agree(squares: Tensor, loss: Tensor, wishes: Sequence[bool]) -> Agreement:
    """One sum over all ranks.

    Args:
        squares: this rank's part of the squared gradient norm, a scalar.
        loss: this rank's, a scalar.
        wishes: of this rank, such as to stop.
    """
    # A NaN may be in one rank's shard alone, yet all ranks must skip the step, or they would train different weights.
    # Infinity and NaN survive every sum (inf - inf is NaN).
    sums = torch.stack([squares, loss.to(squares), *(torch.full_like(squares, wish) for wish in wishes)])
    dist.all_reduce(sums)
    norm = sums[0].sqrt_()  # in place, so that the copy to the host has it
    logged_norm, loss_sum, *counts = sums.cpu().tolist()
    return Agreement(norm, math.isfinite(logged_norm + loss_sum), [count > 0 for count in counts], logged_norm)


class OfRanks(NamedTuple):
    """Numbers of all ranks, on the CPU."""

    names: list[str]
    values: Tensor
    """[ranks, names], 0 where a rank does not have it"""

    def of(self, *names: str) -> Tensor:
        """[ranks, names]"""
        return self.values[:, [self.names.index(name) for name in names]]

    def sums(self) -> dict[str, float]:
        return dict(zip(self.names, self.values.sum(0).tolist(), strict=True))

    def largest(self) -> dict[str, float]:
        """By name, for numbers that are never negative: ranks without a number have 0."""
        return dict(zip(self.names, self.values.amax(0).tolist(), strict=True))


class RankNumbers:
    """Exchanges numbers whose names are known from the start. All ranks make it together.

    Args:
        factors: (name, factor) of each of this rank's numbers, which is multiplied by the factor. Numbers of one name add
            up. Ranks of other pipeline stages have other names.
    """

    def __init__(self, factors: Sequence[tuple[str, float]], device: torch.device) -> None:
        of_ranks: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, list(dict(factors)))
        self._names = list(dict.fromkeys(chain(*of_ranks)))
        place = {name: index for index, name in enumerate(self._names)}
        self._places = torch.tensor([place[name] for name, _ in factors], device=device)
        self._factors = torch.tensor([factor for _, factor in factors], device=device, dtype=torch.float64)

    def gather(self, own: list[Tensor]) -> OfRanks:
        """Send this rank's numbers to all ranks, and get theirs. The host waits for them.

        Args:
            own: tensors of one dimension, in the order of the factors.
        """
        numbers = torch.cat(own).double() * self._factors
        of_one = numbers.new_zeros(1, len(self._names)).index_add_(1, self._places, numbers[None])
        of_ranks = of_one.new_empty(dist.get_world_size(), len(self._names))
        dist.all_gather(list(of_ranks.split(1)), of_one)  # `all_gather_into_tensor` warns, in torch 2.13
        return OfRanks(self._names, of_ranks.cpu())
