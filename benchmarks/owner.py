"""Muon's step on shards in three ways: CPU time and bytes sent, on several gloo processes.

    python benchmarks/owner.py [--processes 2 4] [--width 256] [--layers 3] [--rounds 5]

owner:        `pc.Muon`, which computes each matrix on one rank
full_tensor:  each rank gathers each matrix and computes all of them
torch:        `torch.optim.Muon`, whose matmuls run on DTensors

Matrices of Llama layers are sharded over rows. Figures are of the rank with most: median CPU time of interleaved rounds,
and bytes sent to others in a step, counted at torch's collectives, for a ring where one gathers or reduces.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

import pc
from pc_recipe.files import markdown
from timing import run_on_processes

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95}


class Sent(TorchDispatchMode):  # to other ranks, within the context
    bytes, calls = 0.0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its operations on shards come here again
        name, ranks = function._overloadpacket.__name__, dist.get_world_size()
        if function.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in name and "wrap" not in name:
            self.calls += 1
            if name == "alltoall_base_":
                _, sent, _, _, sizes, *_ = args
                self.bytes += (sum(sizes) - sizes[dist.get_rank()]) * sent.element_size()
            else:
                part = ranks if "all_gather" in name else 2 if "all_reduce" in name else 1  # a shard is given to gather
                self.bytes += part * (ranks - 1) / ranks * args[0].nbytes
        return function(*args, **(kwargs or {}))


class Gathered(torch.optim.Muon):  # every rank orthogonalises every matrix
    @torch.no_grad()
    def step(self, closure=None) -> None:
        for weight in self.param_groups[0]["params"]:
            buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight)).to_local()
            gradient, shard = weight.grad.to_local(), weight.to_local()
            buffer.lerp_(gradient, 1 - OPTIONS["momentum"])
            update = gradient.lerp(buffer, OPTIONS["momentum"]).to(torch.bfloat16)
            full = DTensor.from_local(update, weight.device_mesh, weight.placements, run_check=False).full_tensor()
            full = _zeropower_via_newtonschulz(full, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)
            update = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
            rows, columns = weight.shape
            shard.mul_(1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
            shard.add_(update, alpha=-OPTIONS["lr"] * max(1, rows / columns) ** 0.5)


WAYS = {"owner": pc.Muon, "full_tensor": Gathered, "torch": torch.optim.Muon}


def on_rank(rank: int, processes: int, width: int, layers: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    mesh, hidden = init_device_mesh("cpu", (processes,)), 32 * round(width * 8 / 3 / 32)
    shapes = ([(width, width)] * 4 + [(hidden, width), (width, hidden), (hidden, width)]) * layers
    optimizers, sent, seconds = {}, {}, {way: [] for way in WAYS}
    for way, make in WAYS.items():
        torch.manual_seed(0)
        weights = [distribute_tensor(torch.randn(s), mesh, [Shard(0)], src_data_rank=None) for s in shapes]
        for weight in weights:
            weight.grad = distribute_tensor(torch.randn(weight.shape), mesh, [Shard(0)], src_data_rank=None)
        optimizers[way] = make(weights, **OPTIONS)
        optimizers[way].step()
        with Sent() as sent[way]:
            optimizers[way].step()
    for one, other in zip(
        *(optimizers[way].param_groups[0]["params"] for way in ("owner", "full_tensor")), strict=True
    ):
        assert torch.equal(one.to_local(), other.to_local())
    for _ in range(rounds):
        for way, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            seconds[way].append(time.process_time() - start)
    all_ranks = [None] * processes
    own = {way: (statistics.median(seconds[way]), sent[way].bytes / 2**20, sent[way].calls) for way in WAYS}
    dist.all_gather_object(all_ranks, own)
    if rank == 0:
        busiest = {way: [max(of_rank[way][i] for of_rank in all_ranks) for i in range(3)] for way in WAYS}
        base = busiest["owner"]
        print(f"\n{processes} processes, {len(shapes)} matrices of width {width}, {rounds} rounds\n")
        print(markdown.row(["", "CPU s", "ratio", "MiB sent", "ratio", "collectives"]) + "|---" * 6 + "|")
        for way, (cpu, mib, calls) in busiest.items():
            cells = [way, f"{cpu:.3f}", f"{cpu / base[0]:.2f}", f"{mib:.2f}", f"{mib / base[1]:.2f}", calls]
            print(markdown.row(cells), end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_on_processes(on_rank, __doc__)
