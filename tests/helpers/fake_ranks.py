"""One rank of many on the meta device and torch's fake process group: its collectives are counted, nothing is computed."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pc import step
from pc.shards import shard_gammas, shard_like
from pc.weight import Weight
from pc_recipe.config import Config
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.train import cpu
from pc_recipe.train.llama2 import Llama2, Llama2Args
from pc_recipe.train.parallelize import AlwaysSharded, parallelize
from pc_recipe.train.upstream_config import JobConfig


@dataclass(eq=False)
class Counts(TorchDispatchMode):
    """Counts the all-to-alls of `pc.owner`, and all other collectives."""

    rank: int
    all_to_alls: list[tuple[int, int]] = field(default_factory=list)
    """Bytes sent to other ranks and received from them, of each call."""
    others: Counter[str] = field(default_factory=Counter)
    """Calls of other operations, including those of DTensor."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.others[str(function)] += 1
        return function(*args, **(kwargs or {}))

    def all_to_all(self, receive, send, receive_sizes, send_sizes, group) -> None:
        """Replaces `dist.all_to_all_single`."""
        assert (sum(receive_sizes), sum(send_sizes)) == (receive.numel(), send.numel())
        own = dist.get_process_group_ranks(group).index(self.rank)
        sent, received = (sum(sizes) - sizes[own] for sizes in (send_sizes, receive_sizes))
        self.all_to_alls.append((sent * send.element_size(), received * send.element_size()))


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[Counts]:
    """Makes this process one rank of many. Collectives do nothing; those of `pc.owner` are counted."""
    counts = Counts(rank)
    cpu.use_cpu_where_there_is_no_gpu()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        # PC rejects weights on the meta device, because the initial vectors need data. Here shapes are enough.
        with (
            mock.patch.object(dist, "all_to_all_single", counts.all_to_all),
            mock.patch("pc.api._require_usable"),
            mock.patch.object(Weight, "start", _start_with_shapes),
            mock.patch.object(step, "KEPT_BYTES", 0),
            mock.patch("pc.step.Arrival.find", lambda *_: None),  # values are compared, but there are none to read
        ):
            yield counts
    finally:
        dist.destroy_process_group()


def _start_with_shapes(weight: Weight) -> None:
    effective, module = weight.effective, weight.module
    for key, shape in (("u", weight.split.u_shape), ("v", weight.split.v_shape)):
        module.register_buffer(f"weight_{key}", shard_like(effective, torch.empty(shape, device="meta")))
    gamma = shard_gammas(effective, torch.empty(weight.split.gamma_shape, device="meta"))
    module.register_parameter("weight_gamma", nn.Parameter(gamma))
    module.register_parameter("weight_orig", nn.Parameter(effective.detach().clone()))


def sharded(args: Llama2Args, config: Config, world_size: int) -> nn.Module:
    """The model as the trainer shards it, on the meta device, with a gradient on each weight."""
    dims = AlwaysSharded(RankBatches.of(config, world_size))
    with torch.device("meta"):
        model = Llama2(args)
    parallelize(model, dims, JobConfig(config))
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return model
