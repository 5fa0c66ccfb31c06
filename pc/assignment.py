"""Which rank computes which matrix, and what each rank holds of it: worked out once for each plan of `pc.owner`."""

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from pc.errors import UserError
from pc.shards import Ints, held_slices, is_stack, local, sharded_dims

Item = tuple[Tensor, ...]
Sharding = tuple[Ints, tuple[Placement, ...]]  # shape, and placements over all of the mesh


def matrix_cost(shape: Sequence[int]) -> float:
    """Relative FLOPs of a function of a matrix [..., n, m] that multiplies it by square matrices of its shorter side, and
    these by each other, equally often."""
    short, long = sorted(shape[-2:])
    return float(short) ** 2 * (long + short)


def assign(costs: Sequence[float], num_owners: int) -> list[int]:
    """The owner of each item: assigns the most expensive item first, each to the rank with the least work so far."""
    load, owners = [0.0] * num_owners, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = owner = load.index(min(load))
        load[owner] += costs[index]
    return owners


class Group(NamedTuple):
    """Ranks that exchange shards; by default this rank alone, in a mesh without dimensions."""

    process_group: dist.ProcessGroup | None = None
    rank: int = 0
    sizes: Ints = ()  # of their mesh
    places: tuple[Ints, ...] = ((),)  # of each rank in the mesh


def group_of(tensors: Sequence[Tensor], sharing: dist.ProcessGroup | None) -> Group:
    """The ranks that exchange the tensors of an item; this rank alone if it holds whole matrices and shares no work."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor) and sharded_dims(tensor)}
    if len(meshes) > 1:
        raise UserError("pc.owner needs the tensors of an item on one device mesh")
    dimensions = {d for tensor in tensors for d in sharded_dims(tensor)}
    if is_stack(tensors[0]):
        # Where mesh dimensions shard E of every tensor, each rank holds whole matrices: no exchange there. If one tensor
        # is sharded otherwise, as a replicated gamma is, its parts must be exchanged.
        shard_e = {frozenset(d for d, dim in sharded_dims(tensor).items() if dim == 0) for tensor in tensors}
        dimensions -= shard_e.pop() if len(shard_e) == 1 else set()
    if dimensions:
        return _group_on(meshes.pop(), tuple(sorted(dimensions)), dist.group.WORLD)
    if sharing and sharing.size() > 1 and not any(isinstance(tensor, DTensor) for tensor in tensors):
        return Group(sharing, sharing.rank(), (sharing.size(),), tuple((rank,) for rank in range(sharing.size())))
    return Group()


@lru_cache(maxsize=None)
def _group_on(mesh: DeviceMesh, dimensions: Ints, world: dist.ProcessGroup) -> Group:
    """All ranks of some mesh dimensions. Cached by `world` too, so made anew after `destroy_process_group`."""
    axes = (range(n) if d in dimensions else [mesh.get_local_rank(d)] for d, n in enumerate(mesh.shape))
    # in the order in which process groups number their ranks
    places = tuple(sorted(itertools.product(*axes), key=lambda place: int(mesh.mesh[place])))
    if len(dimensions) == 1:
        group = mesh.get_group(dimensions[0])
    elif len(places) == world.size():
        group = world
    else:
        # created by its own ranks alone: a pipeline stage without matrices makes no plan
        ranks = [int(mesh.mesh[place]) for place in places]  # with this one, so `new_group` returns a group
        group = cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=True))
    return Group(group, dist.get_rank(group), mesh.shape, places)


def matrices_of(group: Group, item: int, sides: Sequence[Item], settings: Hashable) -> "list[Matrix]":
    """The matrices of an item that a group's ranks hold together; the first tensor of the first side is the weight."""

    def sharding(tensor: Tensor) -> Sharding:
        """Shape and placements as the group sees them. For a rank alone its shard counts as the whole tensor, so index 0 of
        a stack is the first matrix that this rank holds."""
        if group.process_group and isinstance(tensor, DTensor) and sharded_dims(tensor):
            return tensor.shape, tensor.placements
        return local(tensor).shape, (Replicate(),) * len(group.sizes)

    weight = sides[0][0]
    shardings = [[sharding(tensor) for tensor in side] for side in sides]
    indices: Sequence[int | None] = [None]
    if is_stack(weight):
        held = [held_slices(*shardings[0][0], group.sizes, place)[0] for place in group.places]
        indices = range(min(rows.start for rows in held), max(rows.stop for rows in held))
    return [Matrix(item, index, settings, shardings, weight.element_size()) for index in indices]


class Matrix:
    """One stored matrix, of one part or several, with the other tensors of its item.

    index: in its stack, or None; sides: for each pass the shardings of its inputs, then of its outputs.
    """

    def __init__(
        self, item: int, index: int | None, settings: Hashable, sides: list[list[Sharding]], size: int
    ) -> None:
        self.item, self.index, self.settings, self.sides = item, index, settings, sides
        self.shapes = [tuple(shape if index is None else shape[1:] for shape, _ in side) for side in sides]
        self.bytes = math.prod(self.shapes[0][0]) * size  # of the weight

    def is_sharded(self, side: int) -> bool:
        return any(not p.is_replicate() for _, placements in self.sides[side] for p in placements)

    def pieces(self, side: int, group: Group, holder: int, nearest_to: int | None = None) -> "Iterator[Piece]":
        """What the rank `holder` has of the tensors of a side.

        Args:
            nearest_to: a rank that needs one copy of each piece. Where a tensor is replicated over a mesh dimension,
                several ranks hold the same piece; only the one with the coordinate of `nearest_to` there gives it.
        """
        place = group.places[holder]
        other = place if nearest_to is None else group.places[nearest_to]
        for tensor, (shape, placements) in enumerate(self.sides[side]):
            if any(a != b for a, b, p in zip(place, other, placements, strict=True) if p.is_replicate()):
                continue
            where: Ints = ()
            slices = held_slices(shape, placements, group.sizes, place)
            if self.index is not None:
                stack, slices = slices[0], slices[1:]
                if not stack.start <= self.index < stack.stop:
                    continue
                where = (self.index - stack.start,)
            lengths = [rows.stop - rows.start for rows in slices]
            if numel := math.prod(lengths):
                yield Piece(self, tensor, where, slices, lengths, numel)


class Piece(NamedTuple):
    """What one rank holds of one tensor of a matrix."""

    matrix: Matrix
    tensor: int  # index in the item
    where: tuple[int, ...]  # index of the matrix in the rank's shard of a stack
    slices: tuple[slice, ...]
    shape: list[int]
    numel: int


def chunks(matrices: list[Matrix], limit: int) -> list[list[Matrix]]:
    """The largest first, equal shapes together, in chunks of at most `limit` bytes or of one matrix."""
    found: list[list[Matrix]] = []
    held = 0
    for matrix in sorted(matrices, key=lambda m: (-m.bytes, m.shapes)):
        held += matrix.bytes
        if not found or held > limit:
            found.append([])
            held = matrix.bytes
        found[-1].append(matrix)
    return found


def reused(buckets: Sequence[Sequence[list[Matrix]]], room: int) -> list[int]:
    """The indices of buckets whose weights every owner can keep in `room` bytes. All ranks get the same: a bucket has a list of
    matrices for each owner."""
    held, found = [0] * max(map(len, buckets), default=0), []
    for index, of_owners in enumerate(buckets):
        after = [size + sum(matrix.bytes for matrix in of) for size, of in zip(held, of_owners, strict=True)]
        if max(after) <= room:
            held = after
            found.append(index)
    return found
