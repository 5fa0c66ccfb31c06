"""Run functions of full matrices on sharded matrices: one rank, the owner, computes each matrix.

Newton-Schulz and both passes of PC need full matrices. An all-gather would repeat the work on every rank. Instead,
matrices are assigned to ranks by cost, one all-to-all sends every shard to its owner, the owner runs the function on
full matrices, batched by shape, and a second all-to-all returns the shards of the results.

        rank 0            rank 1                     rank 0            rank 1
    A[:2] B[:2]       A[2:] B[2:]   all_to_all  ->   A                 B         -> function -> all_to_all

Under FSDP, tensor parallelism, or both, a shard is one rectangular block of its matrix. So one layout covers every
device mesh: the block that each rank holds. The ranks of all mesh dimensions that shard an item form one flat group.
Over the other dimensions (HSDP replicas) each copy of the model repeats the work: sending results between replicas
costs small models more than it saves, and large models do better without replicas (docs/not-measured.md).

A stack [E, n, m] of matrices, such as the experts of a layer, is one item. It is split over E among the owners; mesh
dimensions that shard E itself take no part in the exchange, because their ranks hold whole matrices.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

Item = tuple[Tensor, ...]
Function = Callable[..., tuple[Tensor, ...]]

# Bytes of full inputs per rank and bucket. A rank then needs at most about four times as much (shards sent, shards
# received, the assembled batch, results), plus what the function itself allocates.
BUCKET_BYTES = 256 * 2**20


def matrix_cost(shape: Sequence[int]) -> float:
    """Relative FLOPs of a matrix [..., n, m]; PC at level 4 takes (12 long + 14 short) short^2."""
    short, long = sorted(shape[-2:])
    return float(short) ** 2 * (long + short)


def run_on_owners(
    function: Function,
    inputs: Sequence[Item],
    outputs: Sequence[Item],
    keys: Sequence[Hashable] | None = None,
    **options,
) -> None:
    """Run `function` on full tensors, each item on one rank, and write its results into sharded tensors.

    Every rank of the mesh calls this with the same items. It runs two collectives per bucket of items. To repeat a call
    with tensors of the same layouts, keep the `Plan`.

    Args:
        function: called as `function(key, *batch)`, where each tensor has a leading batch dimension over items with
            the same key and shapes; returns a tuple of batched results, one for each tensor of an output item.
        inputs: the tensors of each item, plain or `DTensor`, a matrix [n, m] or a stack [E, n, m] first, all of one
            dtype. A plain tensor must be the same on every rank.
        outputs: the tensors of each item to write the results into; they may also be inputs.
        keys, options: those of `Plan`.
    """
    Plan(inputs, outputs, keys, **options).run(function, inputs, outputs)


class Plan:
    """Who computes which item, for tensors with the given shapes and shards.

    Args:
        inputs, outputs: as in `run_on_owners`.
        keys: settings of each item for the function; items with different keys go into different batches.
        stacked: of each item, whether the first dimension of all its tensors counts independent matrices. The function
            gets them as a batch.
        costs: of a matrix of each item; the default is `matrix_cost`.
        batch_bytes: upper bound on the inputs of one call of the function (at least one matrix). The default is
            `BUCKET_BYTES` on a GPU, where batches save kernel launches, and one matrix on a CPU, where a batch does not
            fit the cache: on 8 to 16 matrices of [512, 512] and [1408, 512], batches made PC's passes 1.1 to 1.4 times
            slower.

    Raises:
        ValueError: tensors of several dtypes, an item on several meshes, or shards that are not blocks of their tensor.
    """

    def __init__(
        self,
        inputs: Sequence[Item],
        outputs: Sequence[Item],
        keys: Sequence[Hashable] | None = None,
        *,
        stacked: Sequence[bool] | None = None,
        costs: Sequence[float] | None = None,
        batch_bytes: int | None = None,
    ) -> None:
        if len({tensor.dtype for item in inputs for tensor in item}) > 1:
            raise ValueError("run_on_owners needs inputs of one dtype")
        if batch_bytes is None:
            batch_bytes = 0 if inputs and inputs[0][0].device.type == "cpu" else BUCKET_BYTES
        keys = keys if keys is not None else [None] * len(inputs)
        stacked = stacked if stacked is not None else [False] * len(inputs)
        costs = costs if costs is not None else [matrix_cost(item[0].shape) for item in inputs]
        spreads: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[int]] = defaultdict(list)
        for index, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
            spreads[_spread((*given, *wanted), stacked[index])].append(index)
        self._parts = []
        for spread, indices in spreads.items():
            of = [[values[i] for i in indices] for values in (inputs, outputs, keys, stacked, costs)]
            self._parts.append((indices, _Exchange(spread, *of, batch_bytes)))

    @torch.no_grad()
    def run(self, function: Function, inputs: Sequence[Item], outputs: Sequence[Item]) -> None:
        """`run_on_owners` with tensors that have the shapes and shards of those that this plan was made for."""
        for indices, exchange in self._parts:
            exchange.run(function, [inputs[i] for i in indices], [outputs[i] for i in indices])


def assign(costs: Sequence[float], num_owners: int) -> list[int]:
    """The owner of each item: assigns the most expensive item first, each to the rank with the least work so far."""
    load = [(0.0, owner) for owner in range(num_owners)]  # a heap
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least, owners[index] = load[0]
        heapq.heapreplace(load, (least + costs[index], owners[index]))
    return owners


def buckets(owners: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split items into buckets with at most `limit` bytes per owner (at least one item).

    Each bucket takes the next items of every owner, so that all owners work on every bucket.
    """
    filled: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))  # owner: (bucket, bytes in it)
    result: list[list[int]] = []
    for index in sorted(range(len(owners)), key=lambda i: -sizes[i]):
        bucket, held = filled[owners[index]]
        if held and held + sizes[index] > limit:
            bucket, held = bucket + 1, 0
        filled[owners[index]] = bucket, held + sizes[index]
        while len(result) <= bucket:
            result.append([])
        result[bucket].append(index)
    return result


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, not a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharding_dimensions(tensor: Tensor) -> list[int]:
    """The device mesh dimensions that shard a tensor; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return []
    return [
        dimension
        for dimension, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(dimension) > 1
    ]


def _spread(tensors: Sequence[Tensor], stacked: bool) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """An item's mesh and the mesh dimensions of its exchange; None if this rank holds whole matrices."""
    found = [(t.device_mesh, spread) for t in tensors if isinstance(t, DTensor) and (spread := sharding_dimensions(t))]
    if len({mesh for mesh, _ in found}) > 1:
        raise ValueError("run_on_owners needs the tensors of an item on one device mesh")
    dimensions = {d for _, of_tensor in found for d in of_tensor}
    if stacked:  # those that split the stack of every tensor alike
        alike = {frozenset(d for d in sharding_dimensions(t) if t.placements[d].dim == 0) for t in tensors}
        dimensions -= alike.pop() if len(alike) == 1 else set()
    return (found[0][0], tuple(sorted(dimensions))) if dimensions else None


@dataclass(frozen=True)
class _Layout:
    """How one tensor [count, ...] of a piece is sharded over the ranks of the group."""

    shape: tuple[int, ...]
    blocks: list[tuple[tuple[int, int], ...]]
    """by rank: start and length along each dimension"""
    firsts: list[int]
    """by rank: where in the rank's shard the piece begins along the first dimension"""
    numels: list[int]
    """by rank: elements of the block"""
    copies: list[tuple[int, ...]]
    """by rank: coordinate along the mesh dimensions that replicate the tensor"""

    def part(self, full: Tensor, rank: int) -> Tensor:
        """A view of a rank's block of the full tensor."""
        for dim, (start, length) in enumerate(self.blocks[rank]):
            if length != self.shape[dim]:
                full = full.narrow(dim, start, length)
        return full

    def sends(self, rank: int, owner: int) -> bool:
        """Whether the rank sends its block to the owner: only ranks of the owner's replica do."""
        return self.copies[rank] == self.copies[owner] and self.numels[rank] > 0


@lru_cache(maxsize=None)
def _layout(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    sizes: tuple[int, ...],
    start: int,
    count: int,
    shift: int,
) -> _Layout:
    """The layout of matrices [start, start + count) over a group of `sizes` ranks along each of its mesh dimensions.

    Args:
        shape: of the whole tensor; the first dimension counts matrices.
        shift: what to add to a placement's dimension, 1 for a single matrix, whose first dimension is added here.
    """
    plain = [d for d, placement in enumerate(placements) if type(placement) is Shard]
    strided = [d for d, placement in enumerate(placements) if d not in plain and not placement.is_replicate()]
    dims: list[int] = [getattr(placement, "dim", -1) + shift for placement in placements]  # of the tensor
    for d in strided:  # FSDP shards of a tensor that tensor parallelism has already split
        before = math.prod(sizes[e] for e in plain if e > d and dims[e] == dims[d])
        if getattr(placements[d], "split_factor", None) != before:
            raise ValueError(f"run_on_owners needs shards that are blocks of their tensor, not {placements}")
    blocks, firsts, copies = [], [], []
    for coordinate in itertools.product(*(range(size) for size in sizes)):
        block = [(0, size) for size in shape]
        for d in (*plain, *strided):
            begin, length = block[dims[d]]
            piece = math.ceil(length / sizes[d])
            offset = min(length, piece * coordinate[d])
            block[dims[d]] = begin + offset, min(piece, length - offset)
        begin, length = block[0]
        first, end = max(begin, start), min(begin + length, start + count)
        block[0] = (first - start, end - first) if first < end else (0, 0)
        blocks.append(tuple(block))
        firsts.append(first - begin if first < end else 0)
        copies.append(tuple(c for d, c in enumerate(coordinate) if d not in plain and d not in strided))
    numels = [math.prod(length for _, length in block) for block in blocks]
    return _Layout((count, *shape[1:]), blocks, firsts, numels, copies)


@lru_cache(maxsize=None)
def _group_of(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    # Only members of the group call this: a pipeline stage without matrices does not.
    return world if len(ranks) == world.size() else dist.new_group(ranks, use_local_synchronization=True)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Consecutive matrices of an item, which one rank computes."""

    item: int
    key: Hashable
    given: list[_Layout]
    wanted: list[_Layout]
    count: int
    matrix_bytes: int
    """of the inputs of one matrix"""

    @property
    def bytes(self) -> int:
        return self.count * self.matrix_bytes


class _Exchange:
    """The two all-to-alls and the computation between them, over all ranks of some mesh dimensions.

    Without a spread the group is this rank alone, and its shards are full tensors.
    """

    def __init__(self, spread, inputs, outputs, keys, stacked, costs, batch_bytes: int) -> None:
        self.group, self.rank, self.world = None, 0, 1
        self.dimensions, self.sizes = (), ()
        if spread is not None:
            mesh, self.dimensions = spread
            self.sizes = tuple(mesh.size(d) for d in self.dimensions)
            if len(self.dimensions) == 1:
                self.group = mesh.get_group(self.dimensions[0])
            else:
                index = tuple(slice(None) if d in self.dimensions else mesh.get_local_rank(d) for d in range(mesh.ndim))
                self.group = _group_of(tuple(mesh.mesh[index].flatten().tolist()), dist.group.WORLD)
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.stacked, self.batch_bytes = stacked, batch_bytes
        pieces, piece_costs = [], []
        for i, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
            size = sum(math.prod(t.shape[1:] if stacked[i] else t.shape) * t.element_size() for t in given)
            for start, count in self._ranges(i, given[0], size):
                layouts = [[self._layout_of(i, t, start, count) for t in item] for item in (given, wanted)]
                pieces.append(_Piece(i, keys[i], *layouts, count, size))
                piece_costs.append(costs[i] * count)
        owners = assign(piece_costs, self.world)
        split = buckets(owners, [piece.bytes for piece in pieces], BUCKET_BYTES) if self.group else [range(len(pieces))]
        self.buckets = []
        for bucket in split:
            owned: list[list[_Piece]] = [[] for _ in range(self.world)]
            for index in bucket:
                owned[owners[index]].append(pieces[index])
            self.buckets.append((owned, _batches(owned[self.rank], batch_bytes)))

    def _ranges(self, i: int, tensor: Tensor, matrix_bytes: int) -> list[tuple[int, int]]:
        """(start, count) of an item's pieces: an equal share for every rank, at most a bucket each."""
        matrices = self._shape(i, tensor)[0]
        share = max(1, min(math.ceil(matrices / self.world), BUCKET_BYTES // max(1, matrix_bytes)))
        return [(start, min(share, matrices - start)) for start in range(0, matrices, share)]

    def _shape(self, i: int, tensor: Tensor) -> tuple[int, ...]:
        """What the ranks of the group hold together of a tensor, with a first dimension of matrices."""
        if not self.stacked[i]:
            return (1, *tensor.shape)
        if any(tensor.placements[d].is_shard(0) for d in self.dimensions if isinstance(tensor, DTensor)):
            return tuple(tensor.shape)
        return (local(tensor).size(0), *tensor.shape[1:])

    def _layout_of(self, i: int, tensor: Tensor, start: int, count: int) -> _Layout:
        whole = not isinstance(tensor, DTensor)
        placements = tuple(Replicate() if whole else tensor.placements[d] for d in self.dimensions)
        return _layout(self._shape(i, tensor), placements, self.sizes, start, count, 0 if self.stacked[i] else 1)

    def run(self, function: Function, inputs: Sequence[Item], outputs: Sequence[Item]) -> None:
        for owned, batches in self.buckets:
            load = self._gather(inputs, owned) if self.group else self._load_own(inputs)
            results: dict[_Piece, list[Tensor]] = {}
            for batch in batches:
                found = self._compute(function, batch, load(batch))
                of_pieces = zip(*(result.split([piece.count for piece in batch]) for result in found), strict=True)
                results |= dict(zip(batch, of_pieces, strict=True))
                del found, of_pieces
                if not self.group:
                    self._write(outputs, batch, results)
                    results.clear()  # before the next batch
            if self.group:
                self._scatter(results, outputs, owned)

    def _compute(self, function: Function, batch: list[_Piece], tensors: list[Tensor]) -> list[Tensor]:
        """The function's results for all matrices of a batch, in one call or, for a large stack, in several."""
        most = max(1, self.batch_bytes // max(1, batch[0].matrix_bytes))
        calls = [function(batch[0].key, *chunk) for chunk in zip(*(t.split(most) for t in tensors), strict=True)]
        return [results[0] if len(calls) == 1 else torch.cat(results) for results in zip(*calls, strict=True)]

    def _own(self, piece: _Piece, layout: _Layout, tensor: Tensor) -> Tensor:
        """A view of this rank's part of a piece."""
        shard = local(tensor) if self.stacked[piece.item] else local(tensor).unsqueeze(0)
        length = layout.blocks[self.rank][0][1]
        return shard if length == shard.size(0) else shard.narrow(0, layout.firsts[self.rank], length)

    def _load_own(self, inputs) -> Callable[[list[_Piece]], list[Tensor]]:
        def load(batch: list[_Piece]) -> list[Tensor]:
            parts = zip(*(map(self._own, itertools.repeat(p), p.given, inputs[p.item]) for p in batch), strict=True)
            return [part[0] if len(batch) == 1 else torch.cat(part) for part in parts]  # one item is not copied

        return load

    def _write(self, outputs, pieces: list[_Piece], results: dict[_Piece, list[Tensor]]) -> None:
        own = [self._own(p, *pair) for p in pieces for pair in zip(p.wanted, outputs[p.item], strict=True)]
        torch._foreach_copy_(own, [result for p in pieces for result in results[p]])

    def _gather(self, inputs, owned: list[list[_Piece]]) -> Callable[[list[_Piece]], list[Tensor]]:
        """Send local shards to their owners; returns a function that assembles a batch of full tensors on the owner."""
        send, send_sizes = [], []
        for owner, pieces in enumerate(owned):
            parts = [
                self._own(piece, layout, tensor).reshape(-1)
                for piece in pieces
                for layout, tensor in zip(piece.given, inputs[piece.item], strict=True)
                if layout.sends(self.rank, owner)
            ]
            send += parts
            send_sizes.append(sum(part.numel() for part in parts))
        arriving = [  # by source, then piece, then tensor
            (source, piece, index, layout.numels[source])
            for source in range(self.world)
            for piece in owned[self.rank]
            for index, layout in enumerate(piece.given)
            if layout.sends(source, self.rank)
        ]
        receive_sizes = [0] * self.world
        for source, _, _, numel in arriving:
            receive_sizes[source] += numel
        received = self._all_to_all(send, inputs, send_sizes, receive_sizes)
        shards: dict[tuple[_Piece, int], list[tuple[int, Tensor]]] = defaultdict(list)
        for (source, piece, index, _), shard in zip(arriving, received.split([numel for *_, numel in arriving])):
            shards[piece, index].append((source, shard))

        def load(batch: list[_Piece]) -> list[Tensor]:
            tensors = []
            for index, layout in enumerate(batch[0].given):
                full = received.new_empty(sum(piece.count for piece in batch), *layout.shape[1:])
                parts = [
                    (piece.given[index].part(of_piece, source), shard)
                    for piece, of_piece in zip(batch, full.split([piece.count for piece in batch]), strict=True)
                    for source, shard in shards[piece, index]
                ]
                torch._foreach_copy_([part for part, _ in parts], [shard.view(part.shape) for part, shard in parts])
                tensors.append(full)
            return tensors

        return load

    def _scatter(self, results: dict[_Piece, list[Tensor]], outputs, owned: list[list[_Piece]]) -> None:
        """Send each rank its shards of the results and write them into `outputs`."""
        mine = owned[self.rank]
        send = [
            layout.part(result, destination).reshape(-1)
            for destination in range(self.world)
            for piece in mine
            for result, layout in zip(results[piece], piece.wanted, strict=True)
        ]
        send_sizes = [sum(layout.numels[rank] for p in mine for layout in p.wanted) for rank in range(self.world)]
        receive_sizes = [sum(layout.numels[self.rank] for p in pieces for layout in p.wanted) for pieces in owned]
        received = self._all_to_all(send, outputs, send_sizes, receive_sizes)
        parts = [
            self._own(piece, layout, tensor)
            for pieces in owned
            for piece in pieces
            for layout, tensor in zip(piece.wanted, outputs[piece.item], strict=True)
        ]
        shards = received.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [shard.view(part.shape) for part, shard in zip(parts, shards, strict=True)])

    def _all_to_all(self, parts: list[Tensor], like: Sequence[Item], send_sizes, receive_sizes) -> Tensor:
        """All-to-all of flat parts. `like` gives the dtype where a rank has nothing to send."""
        send = torch.cat(parts) if parts else local(like[0][0]).new_empty(0)
        receive = send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=self.group)
        return receive


def _batches(pieces: Iterable[_Piece], limit: int) -> list[list[_Piece]]:
    """Batches of pieces with the same key and shapes, at most `limit` bytes each (at least one piece)."""
    alike: dict[Hashable, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        alike[piece.key, piece.count, tuple(layout.shape for layout in piece.given)].append(piece)
    result = []
    for group in alike.values():
        length = max(1, limit // max(1, group[0].bytes))
        result += [group[start : start + length] for start in range(0, len(group), length)]
    return result
