"""Which slice of a whole tensor a rank holds, as `DTensor` shards it."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pc.errors import UserError

Ints = tuple[int, ...]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, not a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shards_of(items: Iterable[Iterable[Tensor]]) -> list[list[Tensor]]:
    """`local` of each tensor of each item."""
    return [[x._local_tensor if isinstance(x, DTensor) else x for x in item] for item in items]


def innermost(tensor: Tensor) -> Tensor:
    """What holds this rank's entries: a `DTensor`, or a wrapper such as torchao's float8 weights, has no storage of its own."""
    while is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def entries_of(items: Iterable[Iterable[Tensor | None]]) -> list[list[Any]]:
    """`innermost` of each tensor of each item."""
    return [[None if x is None else innermost(x) for x in item] for item in items]


def sharded_dims(tensor: Tensor) -> dict[int, int | None]:
    """{mesh dimension: the tensor's dimension that it shards, None for partial sums}; {} for a plain tensor.

    Mesh dimensions of size 1 are left out.
    """
    if not isinstance(tensor, DTensor):
        return {}
    sizes, placements = tensor.device_mesh.shape, enumerate(tensor.placements)
    return {d: getattr(p, "dim", None) for d, p in placements if not isinstance(p, Replicate) and sizes[d] > 1}


def is_stack(weight: Tensor) -> bool:
    """Whether a weight is [E, n, m], a stack of E independent ones."""
    return weight.ndim == 3


def on_any_rank(conditions: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """Whether each condition is true on any rank that shares these tensors.

    All these ranks call it with the same number of conditions, [k], and get the same answer, 1.0 or 0.0 for each. If they
    took different branches, the next collective would hang.
    """
    found = conditions.float()
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    for group in dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found


def shard_like(weight: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that every rank has whole, sharded along its first dimension as state of a weight:

    for [n, m]: over all mesh dimensions that shard the weight;
    for a stack [E, n, m]: over those that shard E. Those that shard n or m replicate it.

    For a plain weight it stays plain.
    """
    if not isinstance(weight, DTensor):
        return tensor
    mesh = weight.device_mesh
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for d, dim in sharded_dims(weight).items():
        if not is_stack(weight):
            placements[d] = Shard(0)
        elif dim == 0:
            placements[d] = weight.placements[d]
    # a copy: a view would keep the whole tensor's storage, which asynchronous checkpoints cannot stage
    shard = own_slice(tensor, mesh, placements).clone()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def shard_gammas(weight: Tensor, gammas: Tensor) -> Tensor:
    """The gammas of a weight of P matrices, sharded as its state: [P]; for a stack, [E, P] becomes [E P].

    They have one dimension, because Muon would treat two as a matrix. A stack's are sharded as the stack is. But if P > 1
    and the number of ranks does not divide E, each rank has all: DTensor would cut [E P] at other places than the stack. For
    example, 3 experts on 2 ranks are 2 and 1; their 6 gammas, for P = 2, would be 3 and 3 instead of 4 and 2.
    """
    if not isinstance(weight, DTensor):
        return gammas.flatten()
    sharded, mesh = shard_like(weight, gammas), weight.device_mesh
    shares = math.prod(mesh.size(d) for d, dim in sharded_dims(weight).items() if dim == 0)
    if is_stack(weight) and gammas.size(1) > 1 and gammas.size(0) % shares:
        sharded = DTensor.from_local(gammas, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return viewed(sharded, (gammas.numel(),))


def viewed(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of another shape, sharded over the same ranks along its first dimension."""
    if not isinstance(tensor, DTensor):
        return tensor.view(*shape)
    part = local(tensor).view(-1, *shape[1:])
    mesh, stride = tensor.device_mesh, part.stride()
    return DTensor.from_local(part, mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=stride)


def own_slice(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The view of a whole tensor that this rank holds of a `DTensor` with these placements."""
    return tensor[held_slices(tensor.shape, tuple(placements), mesh.shape, tuple(mesh.get_coordinate() or ()))]


@lru_cache(maxsize=None)
def held_slices(shape: Ints, placements: tuple[Placement, ...], sizes: Ints, coordinate: Ints) -> tuple[slice, ...]:
    """What the rank at `coordinate` of a mesh of `sizes` holds of a tensor, as one slice for each dimension.

    For example, [7, m] sharded along its rows over 2 ranks: rows 0:4 and 4:7.

    Torch's own `compute_local_shape_and_global_offset` is wrong where tensor parallelism and then FSDP split a
    dimension unevenly: for 7 rows over 2, then over 3 ranks, it names other rows than FSDP2 has put there.
    """
    held = [slice(0, size) for size in shape]
    dims = [getattr(placement, "dim", None) for placement in placements]
    # FSDP marks its dimension "strided" where tensor parallelism has sharded the same one before: that shard is cut again
    plain = [d for d, placement in enumerate(placements) if type(placement) is Shard]
    strided = [d for d, placement in enumerate(placements) if d not in plain and not placement.is_replicate()]
    not_a_slice = UserError(f"pc.owner needs shards that are slices of their tensor, not {placements}")
    for d in (*plain, *strided):
        dim = dims[d]
        if dim is None:  # partial sums
            raise not_a_slice
        before = math.prod(sizes[e] for e in plain if e > d and dims[e] == dim)
        if d in strided and getattr(placements[d], "split_factor", None) != before:
            raise not_a_slice  # FSDP's shards should be of what tensor parallelism has sharded before
        step = math.ceil((held[dim].stop - held[dim].start) / sizes[d])
        start = min(held[dim].stop, held[dim].start + step * coordinate[d])
        held[dim] = slice(start, min(held[dim].stop, start + step))
    return tuple(held)
