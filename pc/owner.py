"""Run functions of full matrices on sharded matrices: one rank, the owner, computes each matrix (docs/owner.md).

Matrices are assigned to ranks by cost. One all-to-all sends every shard to its owner, a second one returns the results.
With three ranks, A [3, m], B [3, m] and the smaller C [2, m] (its last shard is empty), each owned by one of them:

    rank  holds            sends                                   owns  computes  gets back
    0     A[0] B[0] C[0]   B[0] to 1, C[0] to 2                    A     f(A)      f(A)[0] f(B)[0] f(C)[0]
    1     A[1] B[1] C[1]   A[1] to 0, C[1] to 2                    B     f(B)      f(A)[1] f(B)[1] f(C)[1]
    2     A[2] B[2]        A[2] to 0, B[2] to 1                    C     f(C)      f(A)[2] f(B)[2]

Under FSDP, tensor parallelism, or both, a shard is one rectangular slice of its matrix. The ranks of all mesh
dimensions that shard an item form one flat group. HSDP replicas repeat the work (docs/not-measured.md). A rank that
holds whole matrices, as where a stack [E, n, m] of experts is sharded over E alone, is a group alone and sends nothing.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from pc.errors import UserError
from pc.shards import Ints, held_slices, is_stack, local, sharded_dims
from pc.shards import shard_like as shard_like  # public here

Item = tuple[Tensor, ...]
Sharding = tuple[Ints, tuple[Placement, ...]]  # shape, and placements over all of the mesh
INPUTS, OUTPUTS = 0, 1
BUCKET_BYTES = 256 * 2**20  # of full weights per rank; other inputs, shards sent and received, and results take more
ONE_BY_ONE = ("cpu",)  # devices on which a batch is slower than its matrices; on a GPU it saves kernel launches


def matrix_cost(shape: Sequence[int]) -> float:
    """Relative FLOPs of a matrix [..., n, m]; PC at level 4 takes (12 long + 12 short) short^2, if nothing is
    kept between its passes."""
    short, long = sorted(shape[-2:])
    return float(short) ** 2 * (long + short)


class Plan:
    """Who computes which matrix, for tensors of given shapes and shards. It holds process groups: do not pickle it.

    Every rank of the mesh makes it for the same items.

    Args:
        inputs: the tensors of each item, plain or `DTensor`, all of one dtype. The first of an item is a matrix [n, m], or a
            stack [E, n, m] of E matrices; then all tensors of the item begin with E. A plain tensor must be the same on
            every rank.
        outputs: the tensors of each item to write results into, all of one dtype; they may also be inputs.
        settings: one for each item, passed to the function; by default None.
        costs: for each item, that of one of its matrices; by default `matrix_cost`.
        sharing: ranks that share the work on items without shards; by default each computes all of them.

    Raises:
        UserError: tensors of several dtypes, an item on several meshes, or shards that are not slices of their tensor.
    """

    def __init__(
        self,
        inputs: Sequence[Item],
        outputs: Sequence[Item],
        settings: Sequence[Hashable] | None = None,
        costs: Sequence[float] | None = None,
        sharing: dist.ProcessGroup | None = None,
    ) -> None:
        self._signatures = _signatures(inputs), _signatures(outputs)
        if any(len({dtype for *_, dtype in side}) > 1 for side in self._signatures):
            raise UserError("pc.owner needs inputs of one dtype, and outputs of one dtype")
        settings = settings if settings is not None else [None] * len(inputs)
        costs = costs if costs is not None else [matrix_cost(item[0].shape) for item in inputs]
        of_groups: dict[_Group, list[_Matrix]] = defaultdict(list)
        for item, (given, wanted, of_item) in enumerate(zip(inputs, outputs, settings, strict=True)):
            group = _group((*given, *wanted), sharing)
            of_groups[group] += _matrices(group, item, given, wanted, of_item)
        one_by_one = bool(inputs) and inputs[0][0].device.type in ONE_BY_ONE
        self._buckets: list[_Bucket] = []
        for group, matrices in of_groups.items():
            owned: list[list[_Matrix]] = [[] for _ in group.places]
            for matrix, owner in zip(matrices, assign([costs[m.item] for m in matrices], len(owned)), strict=True):
                owned[owner].append(matrix)
            # Alone on a CPU, each matrix is a bucket of its own: the function gets views of the stored tensors, no copies.
            limit = 0 if one_by_one and not group.process_group else BUCKET_BYTES
            # The first bucket has the first chunk of every owner, and so on: all owners work at the same time.
            buckets = itertools.zip_longest(*(_chunks(of_owner, limit) for of_owner in owned), fillvalue=[])
            self._buckets += [_Bucket(group, of_owners, one_by_one) for of_owners in buckets]

    @torch.no_grad()
    def run(self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Item], outputs: Sequence[Item]) -> None:
        """Run `function` on full tensors, each matrix on one rank, and write its results into `outputs`.

        Every rank calls this. It runs two collectives per bucket of matrices.

        Args:
            function: called as `function(settings, *batch)`, where each tensor has a leading batch dimension over matrices
                with the same settings and shapes; returns a tuple of batched results, one for each tensor of an output item.
                It must not write to its inputs, which may be views of the stored tensors.
            inputs, outputs: tensors with the shapes, shards and dtypes of those that this plan was made for.
        """
        if (_signatures(inputs), _signatures(outputs)) != self._signatures:
            raise UserError("this plan was made for tensors of other shapes, shards or dtypes; make a new one")
        for bucket in self._buckets:
            bucket.run(function, inputs, outputs)

    @property
    def batches(self) -> list[tuple[tuple[int, int | None], ...]]:
        """For each call of the function on this rank, in order: item and index in its stack (None: not in a stack) of
        every matrix. Plans of the same weights, settings, costs and `sharing` have the same batches."""
        return [tuple((m.item, m.index) for m in batch) for bucket in self._buckets for batch in bucket.batches]


class RecentPlans:
    """The plans used last, by a key. Older ones are dropped: if experts without tokens have no gradient, each step may have
    another set of weights."""

    LIMIT = 8

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        plan = self._plans.pop(key, None) or make()
        self._plans[key] = plan
        if len(self._plans) > self.LIMIT:
            del self._plans[next(iter(self._plans))]
        return plan


def assign(costs: Sequence[float], num_owners: int) -> list[int]:
    """The owner of each item: assigns the most expensive item first, each to the rank with the least work so far."""
    load, owners = [0.0] * num_owners, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = owner = load.index(min(load))
        load[owner] += costs[index]
    return owners


def _signatures(items: Sequence[Item]) -> list[tuple]:
    """What a plan depends on."""
    tensors = [tensor for item in items for tensor in item]
    meshes = [(t.device_mesh, t.placements) if isinstance(t, DTensor) else () for t in tensors]
    return [(tensor.shape, mesh, tensor.dtype) for tensor, mesh in zip(tensors, meshes, strict=True)]


class _Group(NamedTuple):
    """Ranks that exchange shards; by default this rank alone, in a mesh without dimensions."""

    process_group: dist.ProcessGroup | None = None
    rank: int = 0
    sizes: Ints = ()  # of their mesh
    places: tuple[Ints, ...] = ((),)  # of each rank in the mesh


def _group(tensors: Sequence[Tensor], sharing: dist.ProcessGroup | None) -> _Group:
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
        return _group_of(meshes.pop(), tuple(sorted(dimensions)), dist.group.WORLD)
    if sharing and sharing.size() > 1 and not any(isinstance(tensor, DTensor) for tensor in tensors):
        return _Group(sharing, sharing.rank(), (sharing.size(),), tuple((rank,) for rank in range(sharing.size())))
    return _Group()


@lru_cache(maxsize=None)
def _group_of(mesh: DeviceMesh, dimensions: Ints, world: dist.ProcessGroup) -> _Group:
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
    return _Group(group, dist.get_rank(group), mesh.shape, places)


def _matrices(group: _Group, item: int, given: Item, wanted: Item, settings: Hashable) -> "list[_Matrix]":
    """The matrices of an item that a group's ranks hold together."""

    def sharding(tensor: Tensor) -> Sharding:
        """Shape and placements as the group sees them. For a rank alone its shard counts as the whole tensor, so index 0 of
        a stack is the first matrix that this rank holds."""
        if group.process_group and isinstance(tensor, DTensor) and sharded_dims(tensor):
            return tensor.shape, tensor.placements
        return local(tensor).shape, (Replicate(),) * len(group.sizes)

    sides = [[sharding(tensor) for tensor in side] for side in (given, wanted)]
    indices: Sequence[int | None] = [None]
    if is_stack(given[0]):
        held = [held_slices(*sides[INPUTS][0], group.sizes, place)[0] for place in group.places]
        indices = range(min(rows.start for rows in held), max(rows.stop for rows in held))
    return [_Matrix(item, index, settings, sides, given[0].element_size()) for index in indices]


class _Matrix:
    """One stored matrix, of one part or several, with the other tensors of its item.

    index: in its stack, or None; sides: shardings of inputs and outputs.
    """

    def __init__(self, item: int, index: int | None, settings: Hashable, sides: list[list[Sharding]], size: int):
        self.item, self.index, self.settings, self.sides = item, index, settings, sides
        self.shapes = [tuple(shape if index is None else shape[1:] for shape, _ in side) for side in sides]
        self.bytes = math.prod(self.shapes[INPUTS][0]) * size  # of the weight
        self.has_sharded_inputs = any(not p.is_replicate() for _, placements in sides[INPUTS] for p in placements)

    def pieces(self, side: int, group: _Group, holder: int, nearest_to: int | None = None) -> "Iterator[_Piece]":
        """What the rank `holder` has of the inputs or outputs.

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
                yield _Piece(self, tensor, where, slices, lengths, numel)


class _Piece(NamedTuple):
    """What one rank holds of one tensor of a matrix."""

    matrix: _Matrix
    tensor: int  # index in the item
    where: tuple[int, ...]  # index of the matrix in the rank's shard of a stack
    slices: tuple[slice, ...]
    shape: list[int]
    numel: int

    def of_shard(self, items: Sequence[Item]) -> Tensor:
        return local(items[self.matrix.item][self.tensor])[self.where]

    def of_matrix(self, tensors: dict[_Matrix, Item]) -> Tensor:
        return tensors[self.matrix][self.tensor][self.slices]


class _Bucket:
    """Matrices that are exchanged together: the two all-to-alls, and the batches of this rank between them."""

    def __init__(self, group: _Group, of_owners: Sequence[list[_Matrix]], one_by_one: bool) -> None:
        def pieces(side: int, owner: int, holder: int) -> list[_Piece]:
            nearest_to = owner if side == INPUTS else None  # an owner gets each input once; every replica gets results
            return [piece for matrix in of_owners[owner] for piece in matrix.pieces(side, group, holder, nearest_to)]

        alike: dict[Hashable, list[_Matrix]] = defaultdict(list)
        for matrix in of_owners[group.rank]:
            alike[matrix if one_by_one else (matrix.settings, *matrix.shapes)].append(matrix)
        self.batches = list(alike.values())
        self.group, ranks = group.process_group, range(len(of_owners))
        self.sends_inputs = any(matrix.has_sharded_inputs for matrix in itertools.chain(*of_owners))
        # For inputs and for outputs: the pieces that this rank holds, a list for each owner; and the pieces of the matrices
        # that it owns, a list for each holder. Inputs go from holder to owner, outputs from owner to holder.
        self.held = [[pieces(side, owner, group.rank) for owner in ranks] for side in (INPUTS, OUTPUTS)]
        self.owned = [[pieces(side, group.rank, holder) for holder in ranks] for side in (INPUTS, OUTPUTS)]

    def run(self, function: Callable, inputs: Sequence[Item], outputs: Sequence[Item]) -> None:
        shards = [piece.of_shard(inputs) for piece in itertools.chain(*self.held[INPUTS])]
        like = local(inputs[0][0])
        if self.sends_inputs:
            shards = self._exchange(shards, self.held[INPUTS], self.owned[INPUTS], like)
        # Otherwise every owner holds its inputs whole, and these shards are what it would receive.
        batches = self._assemble(shards, like)
        results = []
        for batch in self.batches:
            results.append(function(batch[0].settings, *batches.pop(0)))  # pop frees the memory of a batch
            shapes = [tuple(result.shape) for result in results[-1]]
            wanted = [(len(batch), *shape) for shape in batch[0].shapes[OUTPUTS]]
            if shapes != wanted:
                raise UserError(f"the function returned results of shapes {shapes} instead of {wanted}")
        tensors = self._by_matrix(results)
        blocks = [piece.of_matrix(tensors) for piece in itertools.chain(*self.owned[OUTPUTS])]
        received = self._exchange(blocks, self.owned[OUTPUTS], self.held[OUTPUTS], local(outputs[0][0]))
        if received:
            torch._foreach_copy_([p.of_shard(outputs) for p in itertools.chain(*self.held[OUTPUTS])], received)

    def _assemble(self, received: list[Tensor], like: Tensor) -> list[list[Tensor]]:
        """Assemble the received pieces into the batches of this rank."""
        if not self.sends_inputs and all(len(batch) == 1 for batch in self.batches):  # not copied
            counts = [len(batch[0].shapes[INPUTS]) for batch in self.batches]
            views = iter([shard[None] for shard in received])
            return [list(itertools.islice(views, count)) for count in counts]
        batches = [[like.new_empty(len(x), *shape) for shape in x[0].shapes[INPUTS]] for x in self.batches]
        tensors = self._by_matrix(batches)
        if received:
            torch._foreach_copy_([p.of_matrix(tensors) for p in itertools.chain(*self.owned[INPUTS])], received)
        return batches

    def _exchange(
        self, tensors: list[Tensor], sends: list[list[_Piece]], receives: list[list[_Piece]], like: Tensor
    ) -> list[Tensor]:
        """Send the tensors of the pieces, and return those received, in the dtype of `like`; alone, those given."""
        if self.group is None:
            return tensors
        sizes, send_sizes = ([sum(piece.numel for piece in pieces) for pieces in side] for side in (receives, sends))
        send = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(like.dtype) if tensors else like.new_empty(0)
        receive = send.new_empty(sum(sizes))
        dist.all_to_all_single(receive, send, sizes, send_sizes, group=self.group)
        pieces = [*itertools.chain(*receives)]
        blocks = receive.split([piece.numel for piece in pieces])
        return [block.view(piece.shape) for block, piece in zip(blocks, pieces, strict=True)]

    def _by_matrix(self, batches: Sequence[Sequence[Tensor]]) -> dict[_Matrix, Item]:
        """The tensors of each matrix of all batches."""
        tensors = (item for batch in batches for item in zip(*(tensor.unbind() for tensor in batch), strict=True))
        return dict(zip(itertools.chain(*self.batches), tensors, strict=True))


def _chunks(matrices: list[_Matrix], limit: int) -> list[list[_Matrix]]:
    """The largest first, equal shapes together, in chunks of at most `limit` bytes or of one matrix."""
    chunks: list[list[_Matrix]] = []
    held = 0
    for matrix in sorted(matrices, key=lambda m: (-m.bytes, m.shapes)):
        held += matrix.bytes
        if not chunks or held > limit:
            chunks.append([])
            held = matrix.bytes
        chunks[-1].append(matrix)
    return chunks
