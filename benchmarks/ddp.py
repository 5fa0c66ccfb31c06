"""PC's share of a step under DDP: CPU time per rank, where each rank computes all matrices and where ranks share them.

    python benchmarks/ddp.py [--processes 2 4] [--width 256] [--layers 3] [--rounds 5]

Matrices of Llama layers. Figures are of the rank with most: median CPU time of `pull_back` and `write_pc` in
interleaved rounds.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pc
from pc_recipe.files import markdown
from timing import run_on_processes


def on_rank(rank: int, processes: int, width: int, layers: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    hidden = 32 * round(width * 8 / 3 / 32)
    shapes = [(width, width), (width, hidden), (hidden, width), (width, hidden)] * layers
    preconditioners, seconds = {}, {"each": [], "shared": []}
    for way in seconds:
        torch.manual_seed(0)
        model = pc.attach(
            nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes)), pc.PCConfig(blocks=("*",))
        )
        preconditioners[way] = pc.precondition(DistributedDataParallel(model) if way == "shared" else model)
        preconditioners[way].write_pc()
    gradients = [torch.randn(*weight.raw.shape) for weight in preconditioners["each"].weights.values()]
    for _ in range(rounds + 1):  # the first is a warm-up
        for way, preconditioner in preconditioners.items():
            for weight, gradient in zip(preconditioner.weights.values(), gradients, strict=True):
                weight.parameter.grad = gradient.clone()
                weight.gamma.grad = None
            dist.barrier()
            start = time.process_time()
            preconditioner.pull_back()
            preconditioner.restore_raw()
            preconditioner.write_pc(share=True)
            seconds[way].append(time.process_time() - start)
    all_ranks = [None] * processes
    dist.all_gather_object(all_ranks, {way: statistics.median(times[1:]) for way, times in seconds.items()})
    if rank == 0:
        busiest = {way: max(of_rank[way] for of_rank in all_ranks) for way in seconds}
        print(f"\n{processes} processes, {len(shapes)} matrices of width {width}, {rounds} rounds\n")
        print(markdown.row(["", "CPU s", "ratio"]) + "|---" * 3 + "|")
        for way, cpu in busiest.items():
            print(markdown.row([way, f"{cpu:.3f}", f"{cpu / busiest['each']:.2f}"]), end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_on_processes(on_rank, __doc__)
