"""Run functions of full matrices on sharded matrices: one rank, the owner, computes each matrix (docs/owner.md).

Matrices are assigned to ranks by cost. One all-to-all sends every shard to its owner, a second one returns the results.

        rank 0            rank 1                     rank 0            rank 1
    A[:2] B[:2]       A[2:] B[2:]   all_to_all  ->   A                 B         -> function -> all_to_all

Under FSDP, tensor parallelism, or both, a shard is one rectangular block of its matrix. The ranks of all mesh
dimensions that shard an item form one flat group. HSDP replicas repeat the work (docs/not-measured.md). A rank that
holds whole matrices, as where a stack [E, n, m] of experts is sharded over E alone, is a group alone and sends nothing.
"""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from pc.errors import UserError
from pc.shards import Ints, block_of, local, placements_of, sharding_dimensions, split_dim
from pc.shards import shard_like as shard_like  # public here

Item = tuple[Tensor, ...]
Spread = tuple[DeviceMesh, Ints]
Layout = tuple[Ints, tuple[Placement, ...]]  # shape, and placements over the ranks of a group
INPUTS, OUTPUTS = 0, 1
BUCKET_BYTES = 256 * 2**20  # of full inputs per rank; their shards, sent and received, and results take more


def matrix_cost(shape: Sequence[int]) -> float:
    """Relative FLOPs of a matrix [..., n, m]; PC at level 4 takes (12 long + 14 short) short^2."""
    short, long = sorted(shape[-2:])
    return float(short) ** 2 * (long + short)


def run_on_owners(
    function: Callable[..., Sequence[Tensor]],
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
        outputs: the tensors of each item to write the results into, all of one dtype; they may also be inputs.
        keys, options: those of `Plan`.
    """
    Plan(inputs, outputs, keys, **options).run(function, inputs, outputs)


class Plan:
    """Who computes which item, for tensors with the given shapes and shards. It holds process groups: do not pickle it.

    Args:
        keys: settings of each item for the function; items with different keys go into different batches.
        stacked: of each item, whether the first dimension of all its tensors counts independent matrices. The function
            gets them as a batch.
        costs: of a matrix of each item; the default is `matrix_cost`.
        batch_bytes: upper bound on the inputs of one call of the function (at least one matrix). The default is
            `BUCKET_BYTES` on a GPU, where batches save kernel launches, and one matrix on a CPU, where they are slower.

    Attributes:
        owners: of each item, the global ranks that compute its matrices, one for each that this rank's group holds.
        work: costs of the matrices that a rank computes, by global rank, for this rank's groups.
        calls, bytes_sent: all-to-alls of a run, and bytes that this rank sends to others in them.

    Raises:
        UserError: tensors of several dtypes, an item on several meshes, or shards that are not blocks of their tensor.
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
        self._layouts = _layouts(inputs), _layouts(outputs)
        if any(len({dtype for *_, dtype in side}) > 1 for side in self._layouts):
            raise UserError("run_on_owners needs inputs of one dtype, and outputs of one dtype")
        if batch_bytes is None:
            batch_bytes = 0 if inputs and inputs[0][0].device.type == "cpu" else BUCKET_BYTES
        keys = keys if keys is not None else [None] * len(inputs)
        stacked = stacked if stacked is not None else [False] * len(inputs)
        costs = costs if costs is not None else [matrix_cost(item[0].shape) for item in inputs]
        spreads: dict[Spread | None, list[tuple]] = defaultdict(list)
        for item in zip(range(len(inputs)), inputs, outputs, keys, stacked, costs, strict=True):
            spreads[_spread((*item[1], *item[2]), item[4])].append(item)
        self.owners: list[list[int]] = [[] for _ in inputs]
        self.work: Counter[int] = Counter()
        self._buckets: list[_Bucket] = []
        for spread, items in spreads.items():
            group = _Group(spread)
            matrices = [matrix for item in items for matrix in group.matrices(*item)]
            owned: list[list[_Matrix]] = [[] for _ in group.ranks]
            for matrix, owner in zip(matrices, assign([m.cost for m in matrices], len(owned)), strict=True):
                owned[owner].append(matrix)
                self.owners[matrix.item].append(group.ranks[owner])
                self.work[group.ranks[owner]] += matrix.cost
            limit = BUCKET_BYTES if group.process_group else batch_bytes  # alone, a bucket is one batch
            split = [_chunks(sorted(x, key=lambda m: -m.bytes), limit, alike=not group.process_group) for x in owned]
            buckets = itertools.zip_longest(*split, fillvalue=[])  # all owners work on every bucket
            self._buckets += [_Bucket(group, of_owners, batch_bytes) for of_owners in buckets]
        self.calls = 2 * sum(not bucket.is_alone for bucket in self._buckets)
        sent = [(bucket.gather.num_sent, bucket.scatter.num_sent) for bucket in self._buckets]
        self.bytes_sent = sum(n * i[0][0].element_size() for of in sent for n, i in zip(of, (inputs, outputs)))

    @torch.no_grad()
    def run(self, function: Callable, inputs: Sequence[Item], outputs: Sequence[Item]) -> None:
        """`run_on_owners` with tensors that have the shapes, shards and dtypes of those that this plan was made for."""
        if (_layouts(inputs), _layouts(outputs)) != self._layouts:
            raise UserError("this plan was made for tensors of other shapes, shards or dtypes; make a new one")
        for bucket in self._buckets:
            bucket.run(function, inputs, outputs)


def assign(costs: Sequence[float], num_owners: int) -> list[int]:
    """The owner of each item: assigns the most expensive item first, each to the rank with the least work so far."""
    load = [(0.0, owner) for owner in range(num_owners)]  # a heap
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least, owners[index] = load[0]
        heapq.heapreplace(load, (least + costs[index], owners[index]))
    return owners


def _layouts(items: Sequence[Item]) -> list[tuple]:
    """What a plan depends on."""
    return [(t.shape, placements_of(t), t.dtype) for item in items for t in item]


def _spread(tensors: Sequence[Tensor], stacked: bool) -> Spread | None:
    """An item's mesh and the mesh dimensions of its exchange; None if this rank holds whole matrices."""
    meshes = {t.device_mesh for t in tensors if isinstance(t, DTensor) and sharding_dimensions(t)}
    if len(meshes) > 1:
        raise UserError("run_on_owners needs the tensors of an item on one device mesh")
    dimensions = {d for tensor in tensors for d in sharding_dimensions(tensor)}
    if stacked:  # those that split the stack of every tensor alike
        alike = {frozenset(d for d in sharding_dimensions(t) if split_dim(placements_of(t)[d]) == 0) for t in tensors}
        dimensions -= alike.pop() if len(alike) == 1 else set()
    return (meshes.pop(), tuple(sorted(dimensions))) if dimensions else None


@lru_cache(maxsize=None)
def _group_of(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    # Only members of the group call this: a pipeline stage without matrices does not.
    return world if len(ranks) == world.size() else dist.new_group(ranks, use_local_synchronization=True)


class _Group:
    """All ranks of some mesh dimensions; without them, this rank alone."""

    def __init__(self, spread: Spread | None) -> None:
        self.process_group: dist.ProcessGroup | None = None
        self.dimensions: Ints = ()
        self.sizes: Ints = ()
        self.rank, self.ranks = 0, [dist.get_rank() if dist.is_initialized() else 0]
        if spread is not None:
            mesh, self.dimensions = spread
            self.sizes = tuple(mesh.size(d) for d in self.dimensions)
            if len(self.dimensions) == 1:
                group = mesh.get_group(self.dimensions[0])
            else:
                index = tuple(slice(None) if d in self.dimensions else mesh.get_local_rank(d) for d in range(mesh.ndim))
                group = _group_of(tuple(mesh.mesh[index].flatten().tolist()), dist.group.WORLD)
            self.process_group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_process_group_ranks(group)
        self.coordinates = list(itertools.product(*(range(size) for size in self.sizes)))

    def matrices(self, item: int, given: Item, wanted: Item, key: Hashable, stacked: bool, cost: float):
        """The matrices of an item that the ranks hold together."""
        sides = [[self._layout(tensor, stacked) for tensor in side] for side in (given, wanted)]
        indices = range(sides[0][0][0][0]) if stacked else [None]
        return [_Matrix(item, index, key, cost, sides, given[0].element_size()) for index in indices]

    def _layout(self, tensor: Tensor, stacked: bool) -> Layout:
        held = placements_of(tensor)
        placements = tuple(held[d] if held else Replicate() for d in self.dimensions)
        together = not stacked or any(split_dim(p) == 0 for p in placements)
        return tensor.shape if together else (local(tensor).size(0), *tensor.shape[1:]), placements


class _Matrix:
    """One matrix with all that belongs to it: item and index in its stack (None: single); sides: inputs, outputs."""

    def __init__(self, item: int, index: int | None, key: Hashable, cost: float, sides: list[list[Layout]], size: int):
        self.item, self.index, self.key, self.cost, self.sides = item, index, key, cost, sides
        self.shapes = [tuple(shape if index is None else shape[1:] for shape, _ in side) for side in sides]
        self.bytes = sum(math.prod(shape) for shape in self.shapes[0]) * size  # of the inputs

    def parts(self, side: int, group: _Group, rank: int, like: int) -> "Iterator[_Part]":
        """What a rank holds of the inputs or outputs; nothing of a tensor of which rank `like` has another copy."""
        coordinate, other = group.coordinates[rank], group.coordinates[like]
        for tensor, (shape, placements) in enumerate(self.sides[side]):
            where: Ints = ()
            block = block_of(shape, placements, group.sizes, coordinate)
            if self.index is not None:
                stack, block = block[0], block[1:]
                if not stack.start <= self.index < stack.stop:
                    continue
                where = (self.index - stack.start,)
            same = all(a == b for a, b, p in zip(coordinate, other, placements, strict=True) if p.is_replicate())
            lengths = [rows.stop - rows.start for rows in block]
            if same and math.prod(lengths):
                yield _Part(self, tensor, where, block, lengths)


class _Part(NamedTuple):
    """What one rank holds of one tensor of a matrix."""

    matrix: _Matrix
    tensor: int  # index in the item
    where: tuple[int, ...]  # index of the matrix in the rank's shard of a stack
    block: tuple[slice, ...]
    shape: list[int]

    def of_shard(self, items: Sequence[Item]) -> Tensor:
        return local(items[self.matrix.item][self.tensor])[self.where]


class _Route:
    """What this rank sends to each rank of its group, and receives from each."""

    def __init__(self, group: _Group, sends: list[list[_Part]], receives: list[list[_Part]]) -> None:
        self.group = group.process_group
        self.sends, self.receives = (list(itertools.chain(*parts)) for parts in (sends, receives))
        self.sizes = [[sum(math.prod(p.shape) for p in of_rank) for of_rank in x] for x in (receives, sends)]
        self.num_sent = sum(self.sizes[1]) - self.sizes[1][group.rank]  # to others

    def move(self, parts: list[Tensor], like: Tensor) -> list[Tensor]:
        """Send the parts, and return those received, in the dtype of `like`."""
        if self.group is None:
            return parts
        send = torch.cat([part.reshape(-1) for part in parts]).to(like.dtype) if parts else like.new_empty(0)
        receive = send.new_empty(sum(self.sizes[0]))
        dist.all_to_all_single(receive, send, self.sizes[0], self.sizes[1], group=self.group)
        shards = receive.split([math.prod(part.shape) for part in self.receives])
        return [shard.view(part.shape) for shard, part in zip(shards, self.receives, strict=True)]


class _Bucket:
    """Matrices that are exchanged together: the two all-to-alls, and the batches of this rank between them."""

    def __init__(self, group: _Group, owned: Sequence[list[_Matrix]], batch_bytes: int) -> None:
        def parts(side: int, owner: int, holder: int) -> list[_Part]:
            like = owner if side == INPUTS else holder  # an owner gets one copy, results go to all
            return [part for matrix in owned[owner] for part in matrix.parts(side, group, holder, like)]

        me, ranks = group.rank, range(len(owned))
        self.is_alone = group.process_group is None
        self.batches = _chunks(owned[me], batch_bytes, alike=True)
        self.gather = _Route(group, [parts(INPUTS, r, me) for r in ranks], [parts(INPUTS, me, r) for r in ranks])
        self.scatter = _Route(group, [parts(OUTPUTS, me, r) for r in ranks], [parts(OUTPUTS, r, me) for r in ranks])

    def run(self, function: Callable, inputs: Sequence[Item], outputs: Sequence[Item]) -> None:
        received = self.gather.move([part.of_shard(inputs) for part in self.gather.sends], local(inputs[0][0]))
        shards: dict[tuple[_Matrix, int], list[tuple[_Part, Tensor]]] = defaultdict(list)
        for part, shard in zip(self.gather.receives, received, strict=True):
            shards[part.matrix, part.tensor].append((part, shard))
        results: dict[_Matrix, list[Tensor]] = {}
        for batch in self.batches:
            found = function(batch[0].key, *self._assemble(batch, shards, inputs))
            shapes = [tuple(result.shape) for result in found]
            wanted = [(len(batch), *shape) for shape in batch[0].shapes[OUTPUTS]]
            if shapes != wanted:
                raise UserError(f"the function returned results of shapes {shapes} instead of {wanted}")
            results |= {matrix: of_matrix for matrix, *of_matrix in zip(batch, *found, strict=True)}
        del received, shards
        sends = [results[part.matrix][part.tensor][part.block] for part in self.scatter.sends]
        received = self.scatter.move(sends, local(outputs[0][0]))
        if received:
            torch._foreach_copy_([part.of_shard(outputs) for part in self.scatter.receives], received)

    def _assemble(self, batch: list[_Matrix], shards, inputs: Sequence[Item]) -> Iterator[Tensor]:
        for tensor, shape in enumerate(batch[0].shapes[INPUTS]):
            found = [(n, *pair) for n, matrix in enumerate(batch) for pair in shards[matrix, tensor]]
            if self.is_alone and len(found) == 1:
                yield found[0][-1][None]  # not copied
            else:
                full = local(inputs[batch[0].item][tensor]).new_empty(len(batch), *shape)
                torch._foreach_copy_([full[n][part.block] for n, part, _ in found], [shard for *_, shard in found])
                yield full


def _chunks(matrices: Sequence[_Matrix], limit: int, alike: bool) -> list[list[_Matrix]]:
    """The next matrices, at most `limit` bytes together (at least one matrix); if `alike`, of one key and shapes."""
    found: dict[Hashable, list[list[_Matrix]]] = defaultdict(list)
    held: Counter[Hashable] = Counter()
    for matrix in matrices:
        kind = (matrix.key, matrix.shapes[INPUTS]) if alike else None
        if not found[kind] or held[kind] + matrix.bytes > limit:
            found[kind].append([])
            held[kind] = 0
        found[kind][-1].append(matrix)
        held[kind] += matrix.bytes
    return list(itertools.chain(*found.values()))
