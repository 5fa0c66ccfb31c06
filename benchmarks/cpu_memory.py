"""What the memory of a training process on the CPU consists of, beside the tensors that the dry run estimates.

Usage: [NGPU=2] python benchmarks/cpu_memory.py CONFIG --section.key value ...    (two steps; GiB of rank 0)
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path


def resident(kind: str = "VmRSS") -> float:
    """GiB of this process now; "VmHWM": at its peak."""
    return int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20


def measure(path: str, *overrides: str) -> None:
    from pc_recipe.config import load_config
    from pc_recipe.runs import memory
    from pc_recipe.runs.torchrun import STEPS_ALONE
    from pc_recipe.runs.worker import Trainer

    libraries = resident()
    trainer = Trainer(load_config(path, [*overrides, *STEPS_ALONE, "--training.steps=2"]))
    trainer.train()
    peak, at_rest = resident("VmHWM"), resident()
    ctypes.CDLL(None).malloc_trim(0)  # returns what is freed to the system
    estimate = memory.estimate_memory(trainer.config, trainer.parallel_dims)
    if os.environ["RANK"] == "0":
        kept = ("weights", "gradients", "optimizer", "raw W")
        print(f"at the peak {peak:.2f}, estimated {sum(estimate.values()):.2f}; Python and libraries {libraries:.2f}")
        print(
            f"between steps {at_rest:.2f}: freed, but kept by the C library {at_rest - resident():.2f}; estimated "
            f"{sum(estimate[part] for part in kept):.2f}"
        )
    trainer.close()


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(*sys.argv[1:])
    else:
        ranks = os.environ.get("NGPU", "1")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        sys.exit(subprocess.run([*command, *sys.argv]).returncode)
