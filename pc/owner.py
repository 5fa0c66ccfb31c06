"""Run functions of full matrices on sharded matrices: one rank, the owner, computes each matrix.

Newton-Schulz and both passes of PC need full matrices. An all-gather would repeat the work on every rank. Instead,
matrices are assigned to ranks by cost, one all-to-all sends every shard to its owner, the owner runs the function on
full matrices, batched by shape, and a second all-to-all returns the shards of the results.

        rank 0            rank 1                     rank 0            rank 1
    A[:2] B[:2]       A[2:] B[2:]   all_to_all  ->   A                 B         -> function -> all_to_all

Under FSDP, tensor parallelism, or both, a shard is one rectangular block of its matrix. So one layout covers every
device mesh: the block that each rank holds. The ranks of all mesh dimensions that shard an item form one flat group.
Over the other dimensions (HSDP replicas) each copy of the model repeats the work: sending results between replicas
costs small models more than it saves, and large models do better without replicas (docs/scale.md).
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


def matrix_cost(inputs: Item) -> float:
    """Relative FLOPs for an item whose first tensor is the matrix; PC at level 4 takes (12 long + 14 short) short^2."""
    short, long = sorted(inputs[0].shape[-2:])
    return float(short) ** 2 * (long + short)


@torch.no_grad()
def run_on_owners(
    function: Function,
    inputs: Sequence[Item],
    outputs: Sequence[Item],
    keys: Sequence[Hashable] | None = None,
    batch_bytes: int | None = None,
) -> None:
    """Run `function` on full tensors, each item on one rank, and write its results into sharded tensors.

    Every rank of the mesh calls this with the same items. It runs two collectives per bucket of items.

    Args:
        function: called as `function(key, *batch)`, where each tensor has a leading batch dimension over items with
            the same key and shapes; returns a tuple of batched results, one for each tensor of an output item.
        inputs: the tensors of each item, plain or `DTensor`, a matrix [n, m] first, all of one dtype. A plain tensor
            must be the same on every rank.
        outputs: the tensors of each item to write the results into; they may also be inputs.
        keys: settings of each item for `function`; items with different keys go into different batches.
        batch_bytes: upper bound on the inputs of one call of `function` (at least one item). The default is
            `BUCKET_BYTES` on a GPU, where batches save kernel launches, and one item on a CPU, where a batch does not
            fit the cache: on 8 to 16 matrices of [512, 512] and [1408, 512], batches made PC's passes 1.1 to 1.4 times
            slower.

    Raises:
        ValueError: tensors of several dtypes, an item on several meshes, or shards that are not blocks of their tensor.
    """
    keys = keys if keys is not None else [None] * len(inputs)
    if len({tensor.dtype for item in inputs for tensor in item}) > 1:
        raise ValueError("run_on_owners needs inputs of one dtype")
    if batch_bytes is None:
        batch_bytes = 0 if inputs and inputs[0][0].device.type == "cpu" else BUCKET_BYTES
    spreads: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[int]] = defaultdict(list)
    for index, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        spreads[_spread((*given, *wanted))].append(index)
    for spread, indices in spreads.items():
        chosen = [inputs[i] for i in indices], [outputs[i] for i in indices], [keys[i] for i in indices]
        if spread is None:
            _run_alone(function, *chosen, batch_bytes)
        else:
            _Exchange(*spread, *chosen[:2]).run(function, *chosen, batch_bytes)


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


def _spread(tensors: Iterable[Tensor]) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """An item's mesh and the mesh dimensions that shard any of its tensors; None if this rank holds full tensors."""
    found = [(t.device_mesh, spread) for t in tensors if isinstance(t, DTensor) and (spread := sharding_dimensions(t))]
    if len({mesh for mesh, _ in found}) > 1:
        raise ValueError("run_on_owners needs the tensors of an item on one device mesh")
    return (found[0][0], tuple(sorted({d for _, dimensions in found for d in dimensions}))) if found else None


def _run_alone(function: Function, inputs, outputs, keys, batch_bytes: int) -> None:
    """Without shards. A batch of one item is not copied."""

    def load(items: list[int]) -> list[Tensor]:
        parts = zip(*([local(tensor) for tensor in inputs[i]] for i in items), strict=True)
        return [torch.stack(part) if len(items) > 1 else part[0].unsqueeze(0) for part in parts]

    def store(i: int, results: list[Tensor]) -> None:
        for tensor, result in zip(outputs[i], results, strict=True):
            local(tensor).copy_(result)

    shapes = [tuple(tensor.shape for tensor in item) for item in inputs]
    batches = _batches(range(len(inputs)), keys, shapes, [_bytes(item) for item in inputs], batch_bytes)
    _compute(function, keys, batches, load, store)


def _compute(function: Function, keys, batches: list[list[int]], load, store) -> None:
    """`load(items)` returns a batch, `store(i, results)` takes an item's results. Holds one batch at a time."""
    for items in batches:
        results = function(keys[items[0]], *load(items))
        for position, i in enumerate(items):
            store(i, [result[position] for result in results])
        del results  # free them before the next batch


def _bytes(item: Item) -> int:
    """Bytes of an item's full tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in item)


def _batches(
    items: Iterable[int], keys: Sequence[Hashable], shapes: Sequence[tuple], sizes: Sequence[int], limit: int
) -> list[list[int]]:
    """Batches of items with the same key and shapes, at most `limit` bytes each (at least one item)."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for i in items:
        alike[keys[i], shapes[i]].append(i)
    result = []
    for group in alike.values():
        length = max(1, limit // max(1, sizes[group[0]]))
        result += [group[start : start + length] for start in range(0, len(group), length)]
    return result


@dataclass(frozen=True)
class _Layout:
    """How one tensor is sharded over the ranks of the group."""

    shape: torch.Size
    blocks: list[tuple[tuple[int, int], ...]]
    """by rank: start and length along each dimension"""
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
def _layout(shape: torch.Size, placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> _Layout:
    """The layout over a group of `sizes` ranks along each of its mesh dimensions."""
    plain = [d for d, placement in enumerate(placements) if type(placement) is Shard]
    strided = [d for d, placement in enumerate(placements) if d not in plain and not placement.is_replicate()]
    dims: list[int] = [getattr(placement, "dim", -1) for placement in placements]  # of the tensor
    for d in strided:  # FSDP shards of a tensor that tensor parallelism has already split
        before = math.prod(sizes[e] for e in plain if e > d and dims[e] == dims[d])
        if getattr(placements[d], "split_factor", None) != before:
            raise ValueError(f"run_on_owners needs shards that are blocks of their tensor, not {placements}")
    blocks, copies = [], []
    for coordinate in itertools.product(*(range(size) for size in sizes)):
        block = [(0, size) for size in shape]
        for d in (*plain, *strided):
            start, length = block[dims[d]]
            piece = math.ceil(length / sizes[d])
            offset = min(length, piece * coordinate[d])
            block[dims[d]] = start + offset, min(piece, length - offset)
        blocks.append(tuple(block))
        copies.append(tuple(c for d, c in enumerate(coordinate) if d not in plain and d not in strided))
    return _Layout(shape, blocks, [math.prod(length for _, length in block) for block in blocks], copies)


@lru_cache(maxsize=None)
def _group_of(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    # Only members of the group call this: a pipeline stage without matrices does not.
    return world if len(ranks) == world.size() else dist.new_group(ranks, use_local_synchronization=True)


class _Exchange:
    """The two all-to-alls and the computation between them, over all ranks of some mesh dimensions."""

    def __init__(
        self, mesh: DeviceMesh, dimensions: tuple[int, ...], inputs: Sequence[Item], outputs: Sequence[Item]
    ) -> None:
        if len(dimensions) == 1:
            self.group = mesh.get_group(dimensions[0])
        else:
            index = tuple(slice(None) if d in dimensions else mesh.get_local_rank(d) for d in range(mesh.ndim))
            self.group = _group_of(tuple(mesh.mesh[index].flatten().tolist()), dist.group.WORLD)
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.owners = assign([matrix_cost(item) for item in inputs], self.world)
        sizes = tuple(mesh.size(d) for d in dimensions)

        def layout(tensor: Tensor) -> _Layout:
            placements = tensor.placements if isinstance(tensor, DTensor) else (Replicate(),) * mesh.ndim
            return _layout(tensor.shape, tuple(placements[d] for d in dimensions), sizes)

        self.given, self.wanted = ([[layout(t) for t in item] for item in items] for items in (inputs, outputs))

    def run(self, function: Function, inputs, outputs, keys, batch_bytes: int) -> None:
        sizes = [_bytes(item) for item in inputs]
        shapes = [tuple(layout.shape for layout in item) for item in self.given]
        for bucket in buckets(self.owners, sizes, BUCKET_BYTES):
            owned: list[list[int]] = [[] for _ in range(self.world)]
            for i in bucket:
                owned[self.owners[i]].append(i)
            batches = _batches(owned[self.rank], keys, shapes, sizes, batch_bytes)
            results: dict[int, list[Tensor]] = {}
            _compute(function, keys, batches, self._gather(inputs, owned), results.__setitem__)
            self._scatter(results, outputs, owned)
            del results

    def _gather(self, inputs, owned: list[list[int]]) -> Callable[[list[int]], list[Tensor]]:
        """Send local shards to their owners; returns a function that assembles a batch of full tensors on the owner."""
        send, send_sizes = [], []
        for owner, items in enumerate(owned):
            parts = [
                local(tensor).reshape(-1)
                for i in items
                for tensor, layout in zip(inputs[i], self.given[i], strict=True)
                if layout.sends(self.rank, owner)
            ]
            send += parts
            send_sizes.append(sum(part.numel() for part in parts))
        arriving = [  # by source, then item, then tensor
            (source, i, index, layout.numels[source])
            for source in range(self.world)
            for i in owned[self.rank]
            for index, layout in enumerate(self.given[i])
            if layout.sends(source, self.rank)
        ]
        receive_sizes = [0] * self.world
        for source, _, _, numel in arriving:
            receive_sizes[source] += numel
        received = self._all_to_all(send, inputs, send_sizes, receive_sizes)
        pieces: dict[tuple[int, int], list[tuple[int, Tensor]]] = defaultdict(list)
        for (source, i, index, _), piece in zip(arriving, received.split([numel for *_, numel in arriving])):
            pieces[i, index].append((source, piece))

        def load(items: list[int]) -> list[Tensor]:
            batch = []
            for index, layout in enumerate(self.given[items[0]]):
                full = received.new_empty(len(items), *layout.shape)
                parts = [
                    (layout.part(full[position], source), piece)
                    for position, i in enumerate(items)
                    for source, piece in pieces[i, index]
                ]
                torch._foreach_copy_([p for p, _ in parts], [piece.view(p.shape) for p, piece in parts])
                batch.append(full)
            return batch

        return load

    def _scatter(self, results: dict[int, list[Tensor]], outputs, owned: list[list[int]]) -> None:
        """Send each rank its shards of the results and write them into `outputs`."""
        mine = owned[self.rank]
        send = [
            layout.part(result, destination).reshape(-1)
            for destination in range(self.world)
            for i in mine
            for result, layout in zip(results[i], self.wanted[i], strict=True)
        ]
        send_sizes = [sum(layout.numels[rank] for i in mine for layout in self.wanted[i]) for rank in range(self.world)]
        receive_sizes = [sum(layout.numels[self.rank] for i in items for layout in self.wanted[i]) for items in owned]
        received = self._all_to_all(send, outputs, send_sizes, receive_sizes)
        parts = [local(tensor) for items in owned for i in items for tensor in outputs[i]]
        for part, piece in zip(parts, received.split([part.numel() for part in parts]), strict=True):
            part.copy_(piece.view(part.shape))

    def _all_to_all(self, parts: list[Tensor], like: Sequence[Item], send_sizes, receive_sizes) -> Tensor:
        """All-to-all of flat parts. `like` gives the dtype where a rank has nothing to send."""
        send = torch.cat(parts) if parts else local(like[0][0]).new_empty(0)
        receive = send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=self.group)
        return receive
