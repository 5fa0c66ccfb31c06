"""Measures the machines of a run in seconds, and names the rank that is slower than the others.

A rank's own rates are compared: a collective takes as long on all ranks, whoever is slow. So links are judged by
exchanges of pairs, in a few pairings, and a rank counts with its best one: one slow partner is no fault of it.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pc_recipe.files import markdown
from pc_recipe.files.inside import no_link
from pc_recipe.train.environment import read_commit, read_versions

REPEATS = 5
PAIRINGS = 3
SECONDS_OF_CLOCK = 1.0
BEHIND = {"matmul TFLOP/s": 0.1, "pairs GB/s": 0.1, "write GB/s": 0.5, "read GB/s": 0.5}
"""{rate: share below the median from which a rank is named}. Ranks share a file system, which is never even."""


@dataclass(frozen=True)
class Sizes:
    """What is multiplied, exchanged and written."""

    matrix: int
    """Rows, and columns."""
    exchange: int
    """Bytes per rank."""
    file: int
    """Bytes per rank."""


ON_GPU, ON_CPU = Sizes(8192, 2**29, 2**28), Sizes(1024, 2**23, 2**24)


@dataclass(frozen=True)
class Rank:
    """What one rank measured."""

    host: str
    rates: dict[str, float]
    clock: float
    """Seconds since the epoch, after a barrier."""
    versions: dict[str, str | None]


def join_ranks() -> torch.device:
    """Join the other ranks, of torchrun or of srun with a task for each GPU."""
    for name, slurm in (
        ("RANK", "SLURM_PROCID"),
        ("LOCAL_RANK", "SLURM_LOCALID"),
        ("WORLD_SIZE", "SLURM_NTASKS"),
        ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"),
    ):
        if name not in os.environ and slurm in os.environ:
            os.environ[name] = os.environ[slurm]
    os.environ.setdefault("MASTER_PORT", "29400")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **alone)
    return device


def measure(folder: Path, device: torch.device, sizes: Sizes) -> list[Rank]:
    """What each rank measured, in order of rank. All ranks call it.

    Args:
        folder: on the file system of the run, for a file of `sizes.file` bytes per rank, which is removed.
    """
    rates = {"matmul TFLOP/s": _matmul(device, sizes.matrix)}
    rates |= _links(device, sizes.exchange) if dist.get_world_size() > 1 else {}
    rates |= _files(folder, sizes.file)
    dist.barrier()
    known = read_versions() | {"commit": read_commit(), "cuda": torch.version.cuda}
    if device.type == "cuda":
        known |= {"gpu": torch.cuda.get_device_name(device), "nccl": str(torch.cuda.nccl.version())}
    all_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, Rank(socket.gethostname(), rates, time.time(), known))
    return all_ranks


def find_slow_ranks(ranks: list[Rank]) -> list[str]:
    """A line for each rank that is slower than the others, or differs from rank 0 in its clock or a version."""
    findings = []
    medians = {name: statistics.median_high(rank.rates[name] for rank in ranks) for name in ranks[0].rates}
    for number, rank in enumerate(ranks):
        where = f"rank {number} (on {rank.host})"
        for name, share in BEHIND.items():
            if name in medians and (below := 1 - rank.rates[name] / medians[name]) > share:
                findings.append(
                    f"{where}: {name} {rank.rates[name]:.3g}, {below:.0%} below the median {medians[name]:.3g}"
                )
        if abs(late := rank.clock - ranks[0].clock) > SECONDS_OF_CLOCK:
            findings.append(f"{where}: its clock is {late:+.1f} s off rank 0's")
        for name, version in rank.versions.items():
            if version != ranks[0].versions.get(name):
                findings.append(f"{where}: {name} {version}, on rank 0 {ranks[0].versions.get(name)}")
    return findings


def table(ranks: list[Rank]) -> str:
    """Each rate's median, and the slowest rank's."""
    rows = []
    for name in ranks[0].rates:
        values = [rank.rates[name] for rank in ranks]
        slowest = values.index(min(values))
        rows.append((name, f"{statistics.median_high(values):.3g}", f"{min(values):.3g}", slowest))
    clocks = [rank.clock for rank in ranks]
    return (
        markdown.table(("", "median", "slowest", "rank"), rows) + f"\nclocks: {max(clocks) - min(clocks):.3f} s apart\n"
    )


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Median over `REPEATS`, after one that does not count."""
    seconds = []
    for _ in range(REPEATS + 1):
        _wait(device)
        begin = time.perf_counter()
        action()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(device: torch.device, size: int) -> float:
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    return 2e-12 * size**3 / _seconds(lambda: torch.mm(matrix, matrix), device)


def _links(device: torch.device, size: int) -> dict[str, float]:
    """GB/s that a rank sends."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.ones(size // 4 // ranks * ranks, device=device) for _ in range(2))
    whole = 1e-9 * sent.numel() * 4
    others = (ranks - 1) / ranks  # of a tensor, that is for other ranks
    rates = {
        "all-reduce GB/s": 2 * others * whole / _seconds(lambda: dist.all_reduce(sent), device),
        "all-to-all GB/s": others * whole / _seconds(lambda: dist.all_to_all_single(received, sent), device),
    }
    pairs = []
    for shift in range(min(PAIRINGS, ranks)):
        partner = (shift - rank) % ranks  # who has this rank as a partner too

        def swap(partner: int = partner) -> None:
            ends = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()

        dist.barrier()
        if partner != rank:
            pairs.append(whole / _seconds(swap, device))
    return rates | {"pairs GB/s": max(pairs)}


def _files(folder: Path, size: int) -> dict[str, float]:
    """GB/s, with all ranks at once."""
    folder.mkdir(parents=True, exist_ok=True)
    file, content, cpu = folder / f"preflight-{dist.get_rank()}", os.urandom(size), torch.device("cpu")

    def write() -> None:
        with open(file, "wb", opener=no_link) as target:
            target.write(content)
            os.fsync(target.fileno())
            os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or the next read is of memory

    def read() -> None:
        with open(file, "rb") as source:
            source.read()
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    try:
        return {
            f"{name} GB/s": 1e-9 * size / _seconds(action, cpu) for name, action in (("write", write), ("read", read))
        }
    finally:
        file.unlink(missing_ok=True)
