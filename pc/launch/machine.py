"""What a run needs of the machine, checked before its processes start."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from pc.errors import UserError
from pc.settings import Config

SHARED_MEMORY = Path("/dev/shm")
MIB = 2**20


def require(config: Config, processes: int) -> None:
    """Raise a `UserError` if this machine lacks what `processes` of this run need."""
    if config.compile.enable:
        _require_compiler()
    _require_shared_memory(config, processes)


def _require_compiler() -> None:
    """Triton builds its driver with a C compiler; on a CPU, inductor builds its kernels with a C++ compiler."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not torch.cuda.is_available():
        names = [os.environ.get("CXX", "g++")]
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = None
    if not any(shutil.which(name.split()[0]) for name in names):
        missing, package = f"{' or '.join(names)} on the PATH", "g++"
    elif not header.exists():
        missing, package = str(header), f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    if missing:
        raise UserError(
            f"compile.enable = true needs {missing}; install it (Debian: apt-get install {package}), or use false"
        )


def _require_shared_memory(config: Config, processes: int) -> None:
    """Data workers pass batches of tokens and labels through it, 8 bytes each; NCCL wants 1 GiB between GPUs."""
    if not SHARED_MEMORY.is_dir():
        return
    training, loader = config.training, config.training.dataloader
    batch = training.local_batch_size * training.seq_len * 2 * 8
    needed = processes * loader.num_workers * (loader.prefetch_factor or 2) * batch
    needed += 1024 * MIB if processes > 1 and torch.cuda.is_available() else 0
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise UserError(
            f"{SHARED_MEMORY} has {free / MIB:.0f} MiB free, and the data workers and NCCL of {processes} processes "
            f"need {needed / MIB:.0f} MiB; start the container with more (docker run --shm-size=16g, or --ipc=host)"
        )
