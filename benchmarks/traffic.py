"""Bytes that both passes of PC move in a step: in a rank's memory, and between ranks.

    python benchmarks/traffic.py [--config FILE] [--precisions tf32 float32] [--ranks 1 8 64 512]
    PYTHONPATH=CHECKOUT python benchmarks/traffic.py       # another checkout's

Rank 0, which owns the largest matrix, writes PC(W) and pulls a gradient back as `pc.step` does, with all weights of the config,
on the meta device as on a GPU, and in torch's fake process group. Nothing is computed. Each operation reads its inputs and
writes its results once: a matrix times its own transpose reads one matrix, an operation in place reads what it changes, views
are free, copies into batches count, and a function that a GPU fuses is one operation.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pc.command import exit_on_user_error
from pc.half import Fused
from pc.shards import own_slice, shard_gammas, shard_like
from pc.step import Step
from pc.weight import Tensors, Weight
from pc_recipe.config import load_config
from pc_recipe.pages import markdown
from pc_recipe.plan.memory import find_weights

CONFIG = Path(__file__).resolve().parents[1] / "train_configs" / "1b_adamw_pc.toml"
NOTHING = ("empty", "_unsafe_view")  # their results are written later, or are views
NOT_READ = ("copy_", "fill_", "zero_", "new_", "_like")  # their first argument gives a place or a shape


class Traffic(TorchDispatchMode):
    """Counts bytes and matmul FLOPs of operations by name, and bytes of all-to-alls.

    Attributes:
        flops: by dtype of the factors.
        sent, received: to and from other ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls, self.flops = Counter[str](), Counter[str](), Counter[torch.dtype]()
        self.all_to_alls = self.sent = self.received = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, schema, kwargs = function(*args, **(kwargs or {})), function._schema, kwargs or {}
        name = schema.name.removeprefix("aten::")
        is_view = not schema.is_mutable and any(given.alias_info for given in schema.returns)
        if DTensor in types or is_view or any(word in name for word in NOTHING):
            return result
        named = dict(zip((given.name for given in schema.arguments), args, strict=False)) | kwargs
        read = [given.name for given in schema.arguments if not given.is_out]
        if any(word in name for word in NOT_READ):
            read = read[1:]
        changed = [named[given.name] for given in schema.arguments if given.is_write]
        self.add(name, [named.get(argument) for argument in read], changed or result)
        if formula := flop_registry.get(function._overloadpacket):
            tensors = [x for x in args if isinstance(x, Tensor)]
            self.flops[tensors[-1].dtype] += formula(*tensors, out_val=result)
        return result

    def add(self, name: str, read: object, written: object) -> None:
        """Count one kernel."""
        self.calls[name] += 1
        self.bytes[name] += sum(map(_bytes, (read, written)))

    def fused(self, function: Fused, *given: object) -> object:
        """Replaces the call of a function that is one kernel on a GPU."""
        with _disable_current_modes():
            result = function.plain(*given)
        self.add(function.plain.__name__, given, result)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count here, exchanges and fused functions too."""
        all_to_all = mock.patch.object(dist, "all_to_all_single", self.all_to_all)
        with self, all_to_all, mock.patch.object(Fused, "__call__", lambda *given: self.fused(*given)):
            yield

    def all_to_all(self, receive, send, receive_sizes, send_sizes, group) -> None:
        """Replaces `dist.all_to_all_single`."""
        own = dist.get_rank(group)
        self.all_to_alls += 1
        self.sent += (sum(send_sizes) - send_sizes[own]) * send.element_size()
        self.received += (sum(receive_sizes) - receive_sizes[own]) * receive.element_size()


def _bytes(tensors: object) -> int:
    """Of the memory behind some tensors, each place once."""
    places = {}
    for x in tree_leaves(tensors):
        if isinstance(x, Tensor):
            places[x.untyped_storage()._cdata, x.storage_offset(), x.numel()] = x.nbytes
    return sum(places.values())


def tensors_of(weight: Weight, ranks: int) -> Tensors:
    """A weight's tensors on the meta device, sharded by rows over the ranks."""
    effective: Tensor = torch.empty_like(weight.effective, device="meta")
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        shard = own_slice(effective, mesh, [Shard(0)]).clone()
        shape, stride = effective.shape, effective.stride()
        effective = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    split = weight.split
    u, v = (shard_like(effective, torch.empty(shape, device="meta")) for shape in (split.u_shape, split.v_shape))
    gamma = shard_gammas(effective, torch.empty(split.gamma_shape, device="meta"))
    return Tensors(*(nn.Parameter(x) for x in (effective, effective.clone(), gamma)), u, v)


@torch.no_grad()
def count(weights: list[Weight], ranks: int) -> tuple[Traffic, Traffic]:
    """Of a write and of a pull back, on the first of the ranks."""
    traffic = Traffic(), Traffic()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        step = Step({weight.name: weight.split for weight in weights}, None, [])
        tensors = {weight.name: tensors_of(weight, ranks) for weight in weights}
        gradients = [torch.empty_like(one.effective) for one in tensors.values()]
        with traffic[0].counting():
            step.write(tensors, advance=True, share=True)
        with traffic[1].counting():
            step.pull_back(tensors, gradients)
    finally:
        dist.destroy_process_group()
    return traffic


def row(traffic: tuple[Traffic, Traffic]) -> list[str]:
    flops = sum((one.flops for one in traffic), Counter())
    by_dtype = ", ".join(f"{str(dtype).removeprefix('torch.')} {number:.3e}" for dtype, number in flops.items())
    gib = [sum(one.bytes.values()) / 2**30 for one in traffic]
    exchanged = [one.sent + one.received for one in traffic]
    return [
        f"{gib[0]:.2f} + {gib[1]:.2f} = {sum(gib):.2f}",
        str(sum(sum(one.calls.values()) for one in traffic)),
        f"{sum(flops.values()):.3e} ({by_dtype})",
        f"{sum(exchanged) / 2**30:.3f}",
        str(sum(one.all_to_alls for one in traffic)),
    ]


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--precisions", nargs="+", default=["tf32"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--operations", action="store_true", help="print GiB by operation")
    chosen = parser.parse_args()
    rows = []
    for precision in chosen.precisions:
        weights = find_weights(load_config(chosen.config, ["--pc.compute_dtype", precision]))
        for ranks in chosen.ranks:
            traffic = count(weights, ranks)
            rows.append((precision, ranks, *row(traffic)))
            if chosen.operations:
                for name, pass_ in zip(("write PC(W)", "pull back"), traffic, strict=True):
                    table = [(op, pass_.calls[op], f"{size / 2**30:.2f}") for op, size in pass_.bytes.most_common()]
                    print(markdown.table((f"{precision}, {ranks} ranks: {name}", "number", "GiB"), table))
    heads = (
        "precision",
        "ranks",
        "GiB read and written, write + pull back",
        "operations",
        "FLOPs of matmuls (by factors)",
    )
    print(markdown.table((*heads, "GiB sent and received", "all-to-alls"), rows), end="")


if __name__ == "__main__":
    main()
