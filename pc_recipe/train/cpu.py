"""Makes TorchTitan 0.2.2 run on a CPU, which it does not support."""

import math
import os
import resource
import sys
from types import SimpleNamespace

import torch

from pc.errors import UserError

GPU = "/dev/nvidia0"


def _memory_stats(_) -> dict[str, int]:
    """Peak memory of this process since it started, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}


def _properties(_) -> SimpleNamespace:
    return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# The functions of `torch.cuda` that TorchTitan calls; each process counts as one device.
CPU_MODULE = SimpleNamespace(
    set_device=lambda _: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda _: "CPU",
    get_device_properties=_properties,
    memory_stats=_memory_stats,
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)


def count_promised_gpus() -> int:
    """The GPUs that SLURM gave this job on this machine, or 1 if the machine has any; 0 for a run on the CPU.

    Raises:
        UserError: torch can use none of them, and would silently train on the CPU.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    promised = int(os.environ.get("SLURM_GPUS_ON_NODE") or os.path.exists(GPU))
    if promised and not torch.cuda.is_available():
        raise UserError(
            f"this machine has GPUs that torch {torch.__version__} cannot use (a CPU build, or a driver too old for it);"
            " install a torch for your driver, or train on the CPU with CUDA_VISIBLE_DEVICES="
        )
    return promised


def use_cpu_where_there_is_no_gpu() -> None:
    """Replace TorchTitan's default device, also in modules that have imported it by name.

    Raises:
        UserError: there are GPUs that torch cannot use.
    """
    if not is_cpu() or count_promised_gpus():
        return
    import torchtitan.tools.utils as titan_utils  # here, because counting GPUs needs no torchtitan

    # Peak FLOP/s of a CPU are unknown, and so is MFU.
    replacements = {"device_type": "cpu", "device_module": CPU_MODULE, "get_peak_flops": lambda name: math.nan}
    originals = {name: getattr(titan_utils, name) for name in replacements}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torchtitan"):
            for name, value in replacements.items():
                if module.__dict__.get(name) is originals[name]:
                    setattr(module, name, value)


def is_cpu() -> bool:
    """Whether this process trains on the CPU."""
    return not torch.accelerator.is_available()
