"""What a SLURM job asks for, and how long it may take."""

import argparse
import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from pc.errors import UserError

TRAIN_SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "train.sbatch"
SIZES = ("--nodes", "-N", "--gpus", "-G")
"""Prefixes of sbatch's options for nodes and GPUs."""
ASSUMED_GIB = 79.0
"""Memory that torch reports for a GPU sold with 80 GB."""
SPARE = 1.2
"""The recommended time limit, as a multiple of the estimate, which leaves out validation and checkpoints."""


@dataclass(frozen=True)
class Allocation:
    """What a job asks for."""

    nodes: int
    gpus_per_node: int
    """0 trains on CPUs."""
    options: list[str]
    """More options for sbatch."""
    gpu_gib: float = ASSUMED_GIB
    """Memory of each of the job's GPUs, which are not in the login node."""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--nodes", type=int, default=1, help="machines per run (default 1)")
        parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs per machine (default 8; 0: CPU)")
        parser.add_argument(
            "--gpu-memory", type=float, metavar="GIB", default=ASSUMED_GIB, help="of each GPU (default 79)"
        )
        parser.add_argument(
            "--sbatch", default="", help='more options for sbatch: --sbatch="--partition=main --time=8:00:00"'
        )

    @staticmethod
    def of(arguments: argparse.Namespace) -> "Allocation":
        try:
            options = shlex.split(arguments.sbatch)
        except ValueError as error:
            raise UserError(f"--sbatch={arguments.sbatch}: {error}") from None
        for option in options:
            if option.startswith(SIZES):
                raise UserError(f"--sbatch: the checks would not see {option}; give --nodes and --gpus-per-node")
        return Allocation(arguments.nodes, arguments.gpus_per_node, options, arguments.gpu_memory)

    @property
    def world_size(self) -> int:
        return self.nodes * max(1, self.gpus_per_node)

    def sbatch_options(self) -> list[str]:
        gpus = [f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []
        return [f"--nodes={self.nodes}", *gpus, *self.options]

    def require_time(self, hours: float, what: str) -> None:
        """Raise a `UserError` if the job ends for good before it has trained for `hours`."""
        limit, requeues = self._limit()
        if hours > _hours_of(limit) and not requeues:
            raise UserError(
                f"{what} takes about {hours:.1f} hours on {self.world_size} GPUs, but its time limit is {limit} without "
                f'requeue: leave out --no-requeue, or give --sbatch="--time={math.ceil(SPARE * hours)}:00:00"'
            )

    def describe_limit(self, hours: float) -> str:
        """The limit, and how many jobs a run of `hours` takes."""
        limit, _ = self._limit()
        jobs = math.ceil(hours / _hours_of(limit))
        return limit + (f", about {jobs} jobs: each saves at its limit and requeues" if jobs > 1 else "")

    def _limit(self) -> tuple[str, bool]:
        """sbatch's --time, and whether the job may requeue: the command line, else the environment, else the script."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("-t", "--time")
        parser.add_argument("--requeue", action=argparse.BooleanOptionalAction)
        words = [
            w for line in TRAIN_SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ") for w in line.split()[1:]
        ]
        if limit := os.environ.get("SBATCH_TIMELIMIT"):
            words.append(f"--time={limit}")
        words += [
            f"--{name}"
            for name in ("requeue", "no-requeue")
            if f"SBATCH_{name.upper().replace('-', '_')}" in os.environ
        ]
        known, _ = parser.parse_known_args([*words, *self.options])
        return known.time, known.requeue


def _hours_of(limit: str) -> float:
    """Hours of sbatch's --time: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]; infinite if
    there is no limit, or sbatch will refuse it."""
    days, dash, rest = limit.rpartition("-")
    try:
        numbers = [int(number) for number in rest.split(":")]
        if not dash and len(numbers) < 3:
            numbers.insert(0, 0)
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return (24 * int(days or 0) + hours + minutes / 60 + seconds / 3600) or math.inf
    except ValueError:
        return math.inf
