"""What a job of SLURM asks for, and the options of the commands that submit one."""

import argparse
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """The resources to request from SLURM."""

    nodes: int
    gpus_per_node: int
    """0: train on CPUs"""
    options: list[str]
    """more options for sbatch"""

    @staticmethod
    def of(arguments: argparse.Namespace) -> "Allocation":
        return Allocation(arguments.nodes, arguments.gpus_per_node, shlex.split(arguments.sbatch))

    @property
    def world_size(self) -> int:
        return self.nodes * max(1, self.gpus_per_node)

    def words(self) -> list[str]:
        gpus = [f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []
        return [f"--nodes={self.nodes}", *gpus, *self.options]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, help="machines per run (default 1)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs per machine (default 8; 0: CPU)")
    parser.add_argument(
        "--sbatch", default="", help='more options for sbatch: --sbatch="--partition=main --time=8:00:00"'
    )
