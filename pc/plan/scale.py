"""The cost of PC's communication and matmuls on up to thousands of ranks, counted without weights, network or GPUs.

It runs the real code (the trainer's parallelisation, the schedule and `pc.owner`) on the meta device and torch's fake
process group. It simulates one rank: the owner with the most work, which the others wait for.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from pc import attach, named_pc_linears, owner, step
from pc.plan.cost import Matrix, model_flops_per_token
from pc.plan.gpu_time import DEVICES, GPUS_PER_NODE, REACHED
from pc.titan import cpu
from pc.titan.config import JobConfig
from pc.titan.llama2 import FLAVORS, Llama2, Llama2Args
from pc.titan.parallelize import AlwaysSharded, parallelize
from pc.titan.toml import resolve, to_config

H100 = DEVICES["H100"]
TF32 = H100.flops["tf32"] * REACHED.products["tf32"]  # FLOP/s of PC's matmuls
MODEL = H100.flops["bfloat16"] * REACHED.model  # of a whole step, attention counted causally
NVLINK, NETWORK = H100.nvlink * REACHED.link, H100.network * REACHED.link  # bytes per second in one direction
MEMORY = H100.memory * REACHED.memory
COLLECTIVE, PEER = 20e-6, REACHED.peer  # seconds of an all-to-all, and in addition per rank
NOT_COUNTED = ["--compile.enable", "false", "--activation_checkpoint.mode", "none"]


@dataclass
class AllToAll:
    """Bytes of one collective on the simulated rank."""

    sent: int
    received: int
    over_network: int
    """the larger of sent and received to and from other nodes"""
    peers: int

    @property
    def seconds(self) -> float:
        within = max(self.sent, self.received) - self.over_network
        packing = 2 * (self.sent + self.received) / MEMORY  # read and written on this side
        return max(self.over_network / NETWORK, within / NVLINK) + packing + COLLECTIVE + PEER * self.peers


@dataclass(eq=False)
class Counts(TorchDispatchMode):
    """Inside the context: all-to-alls of `pc.owner`, all other collectives, and live bytes of new tensors."""

    rank: int
    all_to_alls: list[AllToAll] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    """including those of DTensor"""
    peak: int = 0
    live: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.others[str(function)] += 1
        result = function(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in known:
                self._grow(leaf.untyped_storage().nbytes())
                finalize(leaf.untyped_storage(), self._grow, -leaf.untyped_storage().nbytes())
        return result

    def _grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def all_to_all(self, receive, send, receive_sizes, send_sizes, group) -> None:
        """Replaces `dist.all_to_all_single`."""
        assert (sum(receive_sizes), sum(send_sizes)) == (receive.numel(), send.numel())
        ranks = dist.get_process_group_ranks(group)
        far = [r // GPUS_PER_NODE != self.rank // GPUS_PER_NODE for r in ranks]
        elements = [
            [size for size, rank in zip(sizes, ranks, strict=True) if rank != self.rank]
            for sizes in (send_sizes, receive_sizes)
        ]
        network = max(
            sum(n for n, is_far in zip(sizes, far, strict=True) if is_far) for sizes in (send_sizes, receive_sizes)
        )
        self.all_to_alls.append(
            AllToAll(
                *(sum(sizes) * send.element_size() for sizes in elements), network * send.element_size(), len(ranks)
            )
        )


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
            mock.patch.object(step, "_initial_state", _state_of_shapes),
        ):
            yield counts
    finally:
        dist.destroy_process_group()


def _state_of_shapes(name: str, layer) -> step.LayerState:
    weight = layer.weight
    u, v = (step._distribute_like(weight, torch.empty(size, device="meta")) for size in weight.shape)
    return step.LayerState(layer, weight, layer.gamma, weight.detach().clone(), u, v)


@dataclass(frozen=True)
class Scale:
    """A step of a config on a number of GPUs."""

    tokens: int
    model_seconds: float
    matrices: int
    busiest: int
    """matrices of the owner with the most work"""
    over_fair_share: float
    """its PC FLOPs relative to an equal share in its replica"""
    flops: int
    materialise: list[AllToAll]
    pull_back: list[AllToAll]
    peak: int
    """peak bytes that PC's passes allocate on it"""

    @property
    def products(self) -> float:
        """seconds"""
        return self.flops / TF32

    @property
    def exchange(self) -> float:
        """seconds"""
        return sum(one.seconds for one in (*self.materialise, *self.pull_back))

    @property
    def least_exchange(self) -> float:
        """Seconds if owners kept W and the optimizer state: only gradients in, PC(W) out."""
        return sum(one.seconds for one in self.pull_back[::2]) / 2 + sum(one.seconds for one in self.materialise[1::2])

    @property
    def share(self) -> float:
        return (self.products + self.exchange) / self.model_seconds


def simulate(path: str | Path, overrides: Sequence[str], world_size: int, replicas_share: bool = False) -> Scale:
    """Simulate the busiest owner. Increases the global batch to one sequence per data-parallel rank if it is smaller.

    Args:
        replicas_share: assign matrices over all HSDP replicas, which `pc.owner` supports but does not do.
    """
    config = to_config(resolve(path, [*overrides, *NOT_COUNTED], JobConfig), JobConfig)
    parallel, training = config.parallelism, config.training
    owners = world_size // (1 if replicas_share else parallel.data_parallel_replicate_degree)
    args = replace(FLAVORS[config.model.flavor], max_seq_len=training.seq_len)
    with torch.device("meta"):
        layers = [layer for _, layer in named_pc_linears(attach(Llama2(args), config.pc.to_pc_config()))]
    owner_of = owner.assign([owner.matrix_cost((layer.weight,)) for layer in layers], owners)
    flops = [
        m.materialise_flops() + m.pull_back_flops() for m in (Matrix(*x.weight.shape, x.pc_config) for x in layers)
    ]
    load = [0] * owners
    for rank, of_matrix in zip(owner_of, flops, strict=True):
        load[rank] += of_matrix
    busiest = load.index(max(load))  # of the first replica
    dimensions = _all_dimensions if replicas_share else owner.sharding_dimensions
    with fake_rank(busiest, world_size) as counts, mock.patch.object(owner, "sharding_dimensions", dimensions):
        schedule = step.StepSchedule(sharded(args, config, world_size))
        with FlopCounterMode(display=False) as counter, counts:
            schedule.materialise()
            materialise = len(counts.all_to_alls)
            schedule.pull_back()
    assert not counts.others, counts.others
    data_ranks = world_size // parallel.tensor_parallel_degree // parallel.context_parallel_degree
    tokens = max(training.global_batch_size, data_ranks) * training.seq_len
    return Scale(
        tokens=tokens,
        model_seconds=tokens * model_flops_per_token(args, training.seq_len, causal=True) / world_size / MODEL,
        matrices=len(layers),
        busiest=owner_of.count(busiest),
        over_fair_share=counter.get_total_flops() / (sum(flops) / owners),
        flops=counter.get_total_flops(),
        materialise=counts.all_to_alls[:materialise],
        pull_back=counts.all_to_alls[materialise:],
        peak=counts.peak,
    )


def _all_dimensions(tensor: torch.Tensor) -> list[int]:
    return [d for d in range(tensor.device_mesh.ndim) if tensor.device_mesh.size(d) > 1]


def sharded(args: Llama2Args, config: JobConfig, world_size: int) -> nn.Module:
    """The model as the trainer shards it, on the meta device, with a gradient on each parameter."""
    tensor, replicas = config.parallelism.tensor_parallel_degree, config.parallelism.data_parallel_replicate_degree
    context = config.parallelism.context_parallel_degree
    shards = world_size // tensor // replicas // context
    degrees = {"dp_replicate": replicas, "dp_shard": shards, "cp": context, "tp": tensor}
    dims = AlwaysSharded(**degrees, pp=1, ep=1, etp=1, world_size=world_size)
    with torch.device("meta"):
        model = Llama2(args)
    parallelize(model, dims, config)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return model


# Config, GPUs, usual mesh, its keys. Small models: FSDP within a node and HSDP replicas, so that only one all-reduce
# uses the network. Large models: tensor parallelism within a node.
REPLICAS, TENSOR = "--parallelism.data_parallel_replicate_degree", "--parallelism.tensor_parallel_degree"
CONTEXT = "--parallelism.context_parallel_degree"
GPUS = (8, 64, 512, 1024)
PLANS: list[tuple[str, int, str, list[str]]] = [
    *(("271m", n, f"HSDP {n // 8} x 8", [REPLICAS, str(n // 8)]) for n in GPUS),
    *(("1b", n, f"HSDP {n // 8} x 8", [REPLICAS, str(n // 8)]) for n in GPUS),
    *(("1b", n, f"FSDP {n}", []) for n in GPUS[1:]),
    *(("7b", n, f"FSDP {n}", []) for n in GPUS),
    ("7b", 512, "HSDP 8 x 64", [REPLICAS, "8"]),
    ("7b", 512, "CP 8 x FSDP 64", [CONTEXT, "8"]),
    *(("13b", n, f"FSDP {n}", []) for n in GPUS),
    *(("70b", n, f"TP 8 x FSDP {n // 8}", []) for n in GPUS),
    ("70b", 512, "FSDP 512", [TENSOR, "1"]),
    ("70b", 512, "TP 8 x HSDP 8 x 8", [REPLICAS, "8"]),
]
HEADINGS = (
    "model | GPUs | mesh | M tokens per step | matrices: all, on the busiest rank | over an equal share | TFLOP | "
    "all-to-alls | GiB sent, received | peak GiB | step without PC, s | matmuls, ms | exchange, ms | PC, % of the step | "
    "least exchange, ms"
)


def row(model: str, gpus: int, mesh: str, scale: Scale) -> str:
    both = (*scale.materialise, *scale.pull_back)
    sent, received = (sum(getattr(one, side) for one in both) / 2**30 for side in ("sent", "received"))
    cells = [
        f"{model.upper()} | {gpus:,} | {mesh} | {scale.tokens / 1e6:.3g} | {scale.matrices}, {scale.busiest}",
        f"{scale.over_fair_share:.2f} | {scale.flops / 1e12:.3g} | {len(both)} | {sent:.2f}, {received:.2f}",
        f"{scale.peak / 2**30:.2f} | {scale.model_seconds:.3g} | {1e3 * scale.products:.3g}",
        f"{1e3 * scale.exchange:.3g} | {100 * scale.share:.2g} | {1e3 * scale.least_exchange:.3g}",
    ]
    return f"| {' | '.join(cells)} |"
