"""Run functions of full matrices on sharded matrices: one rank, the owner, computes each matrix (docs/owner.md).

Matrices are assigned to ranks by cost. One all-to-all sends every shard to its owner, a second one returns the results.
With three ranks, A [3, m], B [3, m] and the smaller C [2, m] (its last shard is empty), each owned by one of them:

    rank  holds            sends                                   owns  computes  gets back
    0     A[0] B[0] C[0]   B[0] to 1, C[0] to 2                    A     f(A)      f(A)[0] f(B)[0] f(C)[0]
    1     A[1] B[1] C[1]   A[1] to 0, C[1] to 2                    B     f(B)      f(A)[1] f(B)[1] f(C)[1]
    2     A[2] B[2]        A[2] to 0, B[2] to 1                    C     f(C)      f(A)[2] f(B)[2]

Under FSDP, tensor parallelism, or both, a shard is one rectangular slice of its matrix. The ranks of all mesh
dimensions that shard an item form one flat group. HSDP replicas repeat the work (docs/performance.md). A rank that
holds whole matrices, as where a stack [E, n, m] of experts is sharded over E alone, is a group alone and sends nothing.
Who computes what is worked out in `pc.assignment`. PC's functions are `evaluate` and `pull_back` of `pc.splits`.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from pc.assignment import Group, Item, Matrix, Piece, assign, chunks, group_of, matrices_of, matrix_cost, reused
from pc.errors import UserError
from pc.shards import shard_like as shard_like  # public here
from pc.shards import shards_of

BUCKET_BYTES = 256 * 2**20  # of full weights per rank; other inputs, shards sent and received, and results take more
ONE_BY_ONE = ("cpu",)  # devices on which a batch is slower than its matrices; on a GPU it saves kernel launches


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
        others: inputs and outputs of other functions of the same matrices, which this plan runs too, in the same batches.
        room: how many bytes its batches may keep on this rank from one run to the next; None: functions keep nothing (`run`).
        reuse: {input of the others: input of the first function, or its output, counted after the inputs} that is the same
            tensor. An owner that has received it keeps it until `forget`, so that it is not sent again.
        reuse_room: how many bytes of weights it may keep on a rank for that.
        apart: functions take a sequence of [1, n, m] in place of [B, n, m], of the matrix or what has its shape, where that saves
            a copy.

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
        others: Sequence[tuple[Sequence[Item], Sequence[Item]]] = (),
        room: int | None = None,
        reuse: Mapping[int, int] = MappingProxyType({}),
        reuse_room: int = 0,
        apart: bool = False,
    ) -> None:
        sides = [side for both in ((inputs, outputs), *others) for side in both]
        self._signatures = [_signature(side) for side in sides]
        self._room = room
        if any(len({dtype for *_, dtype in signature}) > 1 for signature in self._signatures):
            raise UserError("pc.owner needs inputs of one dtype, and outputs of one dtype")
        settings = settings if settings is not None else [None] * len(inputs)
        costs = costs if costs is not None else [matrix_cost(item[0].shape) for item in inputs]
        of_groups: dict[Group, list[Matrix]] = defaultdict(list)
        for item, (of_item, *tensors) in enumerate(zip(settings, *sides, strict=True)):
            group = group_of([*itertools.chain(*tensors)], sharing)
            of_groups[group] += matrices_of(group, item, tensors, of_item)
        one_by_one = bool(inputs) and inputs[0][0].device.type in ONE_BY_ONE
        self._buckets: list[_Bucket] = []
        for group, matrices in of_groups.items():
            owned: list[list[Matrix]] = [[] for _ in group.places]
            for matrix, owner in zip(matrices, assign([costs[m.item] for m in matrices], len(owned)), strict=True):
                owned[owner].append(matrix)
            # Alone on a CPU, each matrix is a bucket of its own: the function gets views of the stored tensors, no copies.
            limit = 0 if one_by_one and not group.process_group else BUCKET_BYTES
            # The first bucket has the first chunk of every owner, and so on: all owners work at the same time.
            found = [*itertools.zip_longest(*(chunks(of_owner, limit) for of_owner in owned), fillvalue=[])]
            reusing = reused(found, reuse_room) if reuse and group.process_group else []
            for index, of_owners in enumerate(found):
                reuses = reuse if index in reusing else {}
                self._buckets.append(_Bucket(group, of_owners, len(sides), one_by_one, reuses, apart))

    @torch.no_grad()
    def run(
        self, function: Callable[..., Sequence], inputs: Sequence[Item], outputs: Sequence[Item], other: int = 0
    ) -> None:
        """Run `function` on full tensors, each matrix on one rank, and write its results into `outputs`.

        Every rank calls this. It runs two collectives per bucket of matrices.

        Args:
            function: called as `function(settings, *batch)`, where each tensor has a leading batch dimension over matrices
                with the same settings and shapes; returns a tuple of batched results, one for each tensor of an output item.
                It must not write to its inputs, which may be views of the stored tensors. In a plan with `room` it returns one
                thing more, such as a list of tensors. That stays here if there is room, and until `forget` the next function
                for this batch gets it as its last argument.
            inputs, outputs: tensors with the shapes, shards and dtypes of those that this plan was made for.
            other: 0: for its `inputs` and `outputs`; 1: for the first of `others`, and so on.
        """
        side = 2 * other
        if self._signatures[side : side + 2] != [_signature(inputs), _signature(outputs)]:
            raise UserError("this plan was made for tensors of other shapes, shards or dtypes; make a new one")
        shards, room = (shards_of(inputs), shards_of(outputs)), self._room
        for bucket in self._buckets:
            room = bucket.run(side, function, *shards, room)

    def forget(self) -> None:
        """Drop what the batches keep. Every rank calls it, or none."""
        for bucket in self._buckets:
            bucket.has_run = False
            for batch in bucket.batches:
                batch.kept, batch.reused = None, {}


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

    def forget(self) -> None:
        for plan in self._plans.values():
            plan.forget()


def _signature(items: Sequence[Item]) -> list[tuple]:
    """What a plan depends on."""
    tensors = [tensor for item in items for tensor in item]
    meshes = [(t.device_mesh, t.placements) if isinstance(t, DTensor) else () for t in tensors]
    return [(tensor.shape, mesh, tensor.dtype) for tensor, mesh in zip(tensors, meshes, strict=True)]


class _Batch:
    """Matrices of equal settings and shapes that this rank computes together."""

    def __init__(self, matrices: list[Matrix]) -> None:
        self.matrices, self.settings = matrices, matrices[0].settings
        self.kept: Any = None
        self.reused: dict[int, Tensor] = {}
        """by the input of other functions"""


class _Bucket:
    """Matrices that are exchanged together: the two all-to-alls, and the batches of this rank between them.

    Sides: the inputs of the first function, its outputs, the inputs of the second, and so on.
    """

    def __init__(
        self,
        group: Group,
        of_owners: Sequence[list[Matrix]],
        sides: int,
        one_by_one: bool,
        reuse: Mapping[int, int],
        apart: bool,
    ) -> None:
        def pieces(side: int, owner: int, holder: int) -> list[Piece]:
            # an owner gets each input once; every replica gets results
            nearest_to = owner if side % 2 == 0 else None
            return [piece for matrix in of_owners[owner] for piece in matrix.pieces(side, group, holder, nearest_to)]

        alike: dict[Hashable, list[Matrix]] = defaultdict(list)
        for matrix in of_owners[group.rank]:
            alike[matrix if one_by_one else (matrix.settings, *matrix.shapes)].append(matrix)
        self.batches = [_Batch(matrices) for matrices in alike.values()]
        self.group, ranks, self._apart = group.process_group, range(len(of_owners)), apart
        # of each input side; results are sent wherever there is a group
        self.sends = {s: any(m.is_sharded(s) for m in itertools.chain(*of_owners)) for s in range(0, sides, 2)}
        self._reuse = reuse if self.sends[0] else {}
        self.has_run = False
        """whether every owner has what it reuses"""
        # For each side: the pieces that this rank holds, a list for each owner; and the pieces of the matrices that it owns,
        # a list for each holder. Inputs go from holder to owner, outputs from owner to holder.
        self.held = [[pieces(side, owner, group.rank) for owner in ranks] for side in range(sides)]
        self.owned = [[pieces(side, group.rank, holder) for holder in ranks] for side in range(sides)]

    def run(
        self,
        side: int,  # of the inputs; the next one has the outputs
        function: Callable,
        inputs: Sequence[Sequence[Tensor]],  # this rank's shards of each item
        outputs: Sequence[Sequence[Tensor]],
        room: int | None,  # bytes; None: functions keep nothing
    ) -> int | None:  # the room that is left
        batches = self._gather(side, inputs)
        tensors: dict[Matrix, Item] = {}
        for batch in self.batches:
            kept = [] if batch.kept is None else [batch.kept]
            given = batches.pop(0)  # pop frees the memory of a batch
            found = [*function(batch.settings, *given, *kept)]
            if not side:
                batch.reused = {other: [*given, *found][mine] for other, mine in self._reuse.items()}
            if room is not None:
                keep = found.pop()
                size = sum(tensor.nbytes for tensor in tree_leaves(keep) if isinstance(tensor, Tensor))
                batch.kept, room = (keep, room - size) if size <= room else (None, room)
            shapes = [tuple(result.shape) for result in found]
            wanted = [(len(batch.matrices), *shape) for shape in batch.matrices[0].shapes[side + 1]]
            if shapes != wanted:
                raise UserError(f"the function returned results of shapes {shapes} instead of {wanted}")
            of_each = zip(*(result.unbind() for result in found), strict=True)
            tensors.update(zip(batch.matrices, of_each, strict=True))
        blocks = [tensors[p.matrix][p.tensor][p.slices] for p in itertools.chain(*self.owned[side + 1])]
        if self.group:
            blocks = self._exchange(blocks, self.owned[side + 1], self.held[side + 1], outputs[0][0])
        if blocks:
            places = [outputs[p.matrix.item][p.tensor][p.where] for p in itertools.chain(*self.held[side + 1])]
            torch._foreach_copy_(places, blocks)
        self.has_run = self.has_run or not side
        return room

    def _gather(self, side: int, inputs: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
        """The inputs of each batch of this rank: sent by the ranks that hold them, or known."""
        like = inputs[0][0]
        known = self._reuse if side and self.has_run else {}
        held, owned = (
            [[p for p in part if p.tensor not in known] for part in of[side]] for of in (self.held, self.owned)
        )
        received = [inputs[p.matrix.item][p.tensor][p.where] for p in itertools.chain(*held)]
        if self.sends[side]:
            received = self._exchange(received, held, owned, like)
        # Otherwise every owner holds its inputs whole, and these shards are what it would receive.
        parts: dict[tuple[Matrix, int], list[tuple[Piece, Tensor]]] = defaultdict(list)
        for piece, block in zip(itertools.chain(*owned), received, strict=True):
            parts[piece.matrix, piece.tensor].append((piece, block))
        batches: list[list[Any]] = [[] for _ in self.batches]
        places, blocks = [], []
        for batch, tensors in zip(self.batches, batches, strict=True):
            matrix_shape, *_ = shapes = batch.matrices[0].shapes[side]
            for index, shape in enumerate(shapes):
                of_each = [parts[matrix, index] for matrix in batch.matrices]
                if index in known:
                    tensors.append(batch.reused[index])
                elif not self.sends[side] and (len(of_each) == 1 or (self._apart and shape == matrix_shape)):
                    views = [block[None] for ((_, block),) in of_each]
                    tensors.append(views if len(views) > 1 else views[0])
                else:
                    tensors.append(like.new_empty(len(of_each), *shape))
                    for tensor, of_one in zip(tensors[-1], of_each, strict=True):
                        places += [tensor[piece.slices] for piece, _ in of_one]
                        blocks += [block for _, block in of_one]
        if blocks:
            torch._foreach_copy_(places, blocks)
        return batches

    def _exchange(
        self, tensors: list[Tensor], sends: list[list[Piece]], receives: list[list[Piece]], like: Tensor
    ) -> list[Tensor]:
        """Send the tensors of the pieces, and return those received, in the dtype of `like`."""
        sizes, send_sizes = ([sum(piece.numel for piece in pieces) for pieces in side] for side in (receives, sends))
        send = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(like.dtype) if tensors else like.new_empty(0)
        receive = send.new_empty(sum(sizes))
        dist.all_to_all_single(receive, send, sizes, send_sizes, group=self.group)
        pieces = [*itertools.chain(*receives)]
        blocks = receive.split([piece.numel for piece in pieces])
        return [block.view(piece.shape) for block, piece in zip(blocks, pieces, strict=True)]
