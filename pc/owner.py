"""Functions of full matrices on sharded matrices: each matrix goes to one rank, its owner.

Newton-Schulz and both passes of PC need whole matrices. Gathering them everywhere repeats the work on every
rank; here the matrices are dealt out by cost, one ragged all-to-all brings every shard to its owner, the
function runs on the full matrices, those of one shape as a batch, and a second all-to-all takes the
results' shards back.

        rank 0            rank 1                     rank 0            rank 1
    A[:2] B[:2]       A[2:] B[2:]   all_to_all  ->   A                 B         -> function -> all_to_all

A tensor takes this path when at most one dimension of its device mesh shards it (FSDP, HSDP, tensor
parallelism alone, or any of them within a pipeline stage). On the mesh's other dimensions the work is
repeated. Tensors sharded along two mesh dimensions (tensor parallelism with FSDP) are gathered on every
rank instead, which is right and slow, and said once.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

logger = logging.getLogger(__name__)

Item = tuple[Tensor, ...]
Function = Callable[..., tuple[Tensor, ...]]

# Bytes of full inputs that one rank holds of a bucket. A rank then needs at most about four times as much
# beside what the function itself allocates: shards sent, shards received, the assembled batch, results.
BUCKET_BYTES = 256 * 2**20


def matrix_cost(inputs: Item) -> float:
    """Floating-point operations of a Gram-matrix product, up to a constant, for an item led by its matrix."""
    n, m = inputs[0].shape[-2:]
    return float(min(n, m)) ** 2 * max(n, m)


@torch.no_grad()
def run_on_owners(
    function: Function,
    inputs: Sequence[Item],
    outputs: Sequence[Item],
    keys: Sequence[Hashable] | None = None,
    batch_bytes: int | None = None,
) -> None:
    """Run `function` on full tensors, each item on one rank, and write its results into sharded tensors.

    Every rank of the mesh calls this with the same items. Two collectives are made for each bucket of items.

    Args:
        function: called as `function(key, *batch)`, each tensor with a leading batch dimension of items that
            share key and shapes; returns a tuple of batched results, one for each tensor of an output item.
        inputs: for each item its tensors, plain or `DTensor`, a matrix [n, m] first, all of one dtype.
        outputs: for each item the tensors to write the results into; they may be inputs too.
        keys: what `function` must know of an item beside its tensors; items with other keys go in other batches.
        batch_bytes: bound on the inputs of one call of `function` (one item at least). By default `BUCKET_BYTES`, since
            batches save a GPU launches, and one item on a CPU, where a batch leaves the cache: for 8 to 16 matrices
            of [512, 512] and [1408, 512] PC's passes took 1.1 to 1.4 times as long as one by one.

    Raises:
        ValueError: tensors of several dtypes, or a placement that is neither `Shard` nor `Replicate`.
    """
    keys = keys if keys is not None else [None] * len(inputs)
    if len({tensor.dtype for item in inputs for tensor in item}) > 1:
        raise ValueError("run_on_owners needs inputs of one dtype")
    if batch_bytes is None and inputs:
        batch_bytes = 0 if inputs[0][0].device.type == "cpu" else BUCKET_BYTES
    routes: dict[object, list[int]] = defaultdict(list)
    for index, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        routes[_route((*given, *wanted))].append(index)
    for route, indices in routes.items():
        chosen = [[sequence[i] for i in indices] for sequence in (inputs, outputs, keys)]
        if route is None:
            _run_alone(function, *chosen, batch_bytes)
        elif route == "gather":
            _run_everywhere(function, *chosen)
        else:
            _Exchange(route, *chosen[:2]).run(function, *chosen, batch_bytes)


def assign(costs: Sequence[float], num_owners: int) -> list[int]:
    """The owner of each item: dearest first, each to the rank with the least so far."""
    load = [0.0] * num_owners
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = min(range(num_owners), key=load.__getitem__)
        owners[index] = owner
        load[owner] += costs[index]
    return owners


def buckets(owners: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split items into buckets so that no owner holds more than `limit` bytes of one (one item at least).

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
    """This rank's part of a tensor; writing into it writes into the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shard_bounds(size: int, num_shards: int, shard: int) -> tuple[int, int]:
    """Start and length of a shard of `Shard(dim)` along a dimension of `size`; the last ones may be empty."""
    length = math.ceil(size / num_shards)
    start = min(size, shard * length)
    return start, min(size, start + length) - start


def sharding_dimensions(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor's device mesh over which it is spread; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return []
    return [
        dimension
        for dimension, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(dimension) > 1
    ]


def _route(tensors: Iterable[Tensor]) -> object:
    """Where an item's shards lie: None (whole here), a process group, or "gather" (several mesh dimensions)."""
    groups = set()
    for tensor in tensors:
        for dimension in sharding_dimensions(tensor):
            placement = tensor.placements[dimension]
            if placement.is_partial():
                raise ValueError(f"run_on_owners takes Shard and Replicate, not {placement}")
            if type(placement) is not Shard:
                return "gather"  # the interleaved shards that tensor parallelism under FSDP makes
            groups.add(tensor.device_mesh.get_group(dimension))
    if len(groups) > 1:
        return "gather"
    return groups.pop() if groups else None


def _run_alone(function: Function, inputs, outputs, keys, batch_bytes: int) -> None:
    """No shards: an item by itself is not copied."""
    shapes = [tuple(tensor.shape for tensor in item) for item in inputs]
    for items in _batches(range(len(inputs)), keys, shapes, [_bytes(item) for item in inputs], batch_bytes):
        parts = zip(*([local(tensor) for tensor in inputs[i]] for i in items), strict=True)
        batch = [torch.stack(part) if len(items) > 1 else part[0].unsqueeze(0) for part in parts]
        results = function(keys[items[0]], *batch)
        for position, i in enumerate(items):
            for tensor, result in zip(outputs[i], results, strict=True):
                local(tensor).copy_(result[position])


def _bytes(item: Item) -> int:
    """Of an item's full tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in item)


def _batches(
    items: Iterable[int], keys: Sequence[Hashable], shapes: Sequence[tuple], sizes: Sequence[int], limit: int
) -> list[list[int]]:
    """Items of one key and shapes each, of at most `limit` bytes together (one item at least)."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for i in items:
        alike[keys[i], shapes[i]].append(i)
    result = []
    for group in alike.values():
        length = max(1, limit // max(1, sizes[group[0]]))
        result += [group[start : start + length] for start in range(0, len(group), length)]
    return result


_warned_gather = False


def _run_everywhere(function: Function, inputs, outputs, keys) -> None:
    """Shards along several mesh dimensions: gather each item on every rank and keep the own part of the result."""
    global _warned_gather
    if not _warned_gather:
        logger.warning(
            "Matrices sharded along two mesh dimensions (tensor parallelism with FSDP): PC and Muon gather them on "
            "every rank and repeat the work there. Results are the same; the step is slower."
        )
        _warned_gather = True
    for given, wanted, key in zip(inputs, outputs, keys, strict=True):
        full = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in given]
        results = function(key, *(tensor.unsqueeze(0) for tensor in full))
        for tensor, result in zip(wanted, results, strict=True):
            if isinstance(tensor, DTensor):
                replicated = DTensor.from_local(
                    result[0].contiguous(), tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False
                )
                result = replicated.redistribute(placements=tensor.placements)._local_tensor[None]
            local(tensor).copy_(result[0])


@dataclass(frozen=True)
class _Layout:
    """How one tensor lies over the ranks of the group."""

    shape: torch.Size
    dim: int | None  # sharded tensor dimension; None: every rank has all of it

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        dimensions = sharding_dimensions(tensor)
        return cls(tensor.shape, tensor.placements[dimensions[0]].dim % tensor.ndim if dimensions else None)

    def part(self, full: Tensor, num_shards: int, shard: int) -> Tensor:
        """The view of a full tensor that lies on rank `shard`."""
        if self.dim is None:
            return full
        return full.narrow(self.dim, *shard_bounds(self.shape[self.dim], num_shards, shard))

    def part_shape(self, num_shards: int, shard: int) -> torch.Size:
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] = shard_bounds(shape[self.dim], num_shards, shard)[1]
        return torch.Size(shape)


class _Exchange:
    """The two all-to-alls and the work between them, over one process group."""

    def __init__(self, group: dist.ProcessGroup, inputs: Sequence[Item], outputs: Sequence[Item]) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.owners = assign([matrix_cost(item) for item in inputs], self.world)
        self.given = [[_Layout.of(tensor) for tensor in item] for item in inputs]
        self.wanted = [[_Layout.of(tensor) for tensor in item] for item in outputs]

    def run(self, function: Function, inputs, outputs, keys, batch_bytes: int) -> None:
        sizes = [_bytes(item) for item in inputs]
        shapes = [tuple(layout.shape for layout in item) for item in self.given]
        for bucket in buckets(self.owners, sizes, BUCKET_BYTES):
            owned = [[i for i in bucket if self.owners[i] == rank] for rank in range(self.world)]
            received = self._gather(inputs, owned)
            batches = _batches(owned[self.rank], keys, shapes, sizes, batch_bytes)
            results = self._compute(function, received, owned[self.rank], batches, keys)
            del received
            self._scatter(results, outputs, owned)

    def _gather(self, inputs, owned: list[list[int]]) -> Tensor:
        """Send local shards to their owners; returns what arrived, flat: by source, then item, then tensor."""
        send, send_sizes = [], []
        for owner, items in enumerate(owned):
            parts = [
                local(tensor).reshape(-1)
                for i in items
                for tensor, layout in zip(inputs[i], self.given[i], strict=True)
                # what every rank has, the owner has too
                if layout.dim is not None or owner == self.rank
            ]
            send += parts
            send_sizes.append(sum(part.numel() for part in parts))
        receive_sizes = [
            sum(
                layout.part_shape(self.world, source).numel()
                for i in owned[self.rank]
                for layout in self.given[i]
                if layout.dim is not None or source == self.rank
            )
            for source in range(self.world)
        ]
        return self._all_to_all(torch.cat(send), send_sizes, receive_sizes)

    def _compute(
        self, function: Function, received: Tensor, mine: list[int], batches: list[list[int]], keys
    ) -> dict[int, tuple[Tensor, ...]]:
        """Assemble full tensors in batches, and run the function on each batch."""
        place: dict[int, tuple[list[Tensor], int]] = {}
        for items in batches:
            full = [received.new_empty(len(items), *layout.shape) for layout in self.given[items[0]]]
            place.update({i: (full, position) for position, i in enumerate(items)})
        offset = 0
        for source in range(self.world):
            for i in mine:
                full, position = place[i]
                for tensor, layout in zip(full, self.given[i], strict=True):
                    if layout.dim is None and source != self.rank:
                        continue
                    part = layout.part(tensor[position], self.world, source)
                    part.copy_(received[offset : offset + part.numel()].view(part.shape))
                    offset += part.numel()
        results = {}
        for items in batches:
            batched = function(keys[items[0]], *place[items[0]][0])
            results.update({i: tuple(result[b] for result in batched) for b, i in enumerate(items)})
        return results

    def _scatter(self, results: dict[int, tuple[Tensor, ...]], outputs, owned: list[list[int]]) -> None:
        """Send each rank its shards of the results and write what arrives."""
        mine = owned[self.rank]
        send, send_sizes = [], []
        for destination in range(self.world):
            parts = [
                layout.part(result, self.world, destination).reshape(-1)
                for i in mine
                for result, layout in zip(results[i], self.wanted[i], strict=True)
            ]
            send += parts
            send_sizes.append(sum(part.numel() for part in parts))
        receive_sizes = [
            sum(layout.part_shape(self.world, self.rank).numel() for i in items for layout in self.wanted[i])
            for items in owned
        ]
        if send:
            flat = torch.cat(send)
        else:  # this rank owns nothing; what arrives has the dtype of what is written
            like = local(outputs[next(i for items in owned for i in items)][0])
            flat = like.new_empty(0)
        received = self._all_to_all(flat, send_sizes, receive_sizes)
        offset = 0
        for items in owned:
            for i in items:
                for tensor in outputs[i]:
                    part = local(tensor)
                    part.copy_(received[offset : offset + part.numel()].view(part.shape))
                    offset += part.numel()

    def _all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        receive = send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=self.group)
        return receive
