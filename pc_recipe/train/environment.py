"""What a run's results depend on: written to its folder, and compared over ranks before a difference can hang them."""

import json
import os
import platform
import re
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.config.run_key import all_values
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.places import ENVIRONMENT
from pc_recipe.files.run_folder import read_parts
from pc_recipe.train.inputs import code_version, data_checksums

PACKAGES = ("torch", "torchtitan", "datasets", "lm-eval", "transformers", "numpy")
DIFFERENCES_SHOWN = 4


def write_environment(
    folder: Path, config: Config, world_size: int, step: int, tokenizer: dict[str, str] | None = None
) -> None:
    """Write hardware, versions, commit, and checksums of data and tokenizer to `environment.json`.

    Args:
        step: the one that the run continues from. If it is not 0, earlier parts of the run, with other code, data, number
            of processes or processor, are kept under "earlier".
    """
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    content: dict[str, Any] = {
        "versions": read_versions(),
        "commit": read_commit(),
        "code": code_version(),
        "data": data_checksums(config),
        "tokenizer": tokenizer,
        "gpus": gpus,
        "cpu": torch.backends.cpu.get_cpu_capability(),  # another instruction set rounds differently
        "processor": read_processor(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "world_size": world_size,
    }
    if step:
        before, *earlier = read_parts(folder)
        if any(before.get(key) != content[key] for key in ("code", "data", "world_size", "processor")):
            earlier = [before, *earlier]
        content["earlier"] = earlier
    write_atomically(folder / ENVIRONMENT, json.dumps(content, indent=1) + "\n")


def read_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that affect a run's results; None if not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed


def read_processor() -> dict[str, str]:
    """What /proc/cpuinfo says of it: {"vendor_id": "AuthenticAMD", "model name": ...}; {} where there is none."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if look.is_there(file) else ""
    return dict(re.findall(r"^(vendor_id|cpu family|model name|model)\t+: (.*)$", text, re.MULTILINE))


def read_commit() -> str | None:
    """The git commit of this code, with "+" if files differ from it; None outside a git checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() or None


def require_agreement(config: Config) -> None:
    """Compare settings, versions, commit and the data's checksums with rank 0. All ranks must call it; all raise or none.

    Raises:
        UserError: names the first rank that differs, its host, and what differs, with both values.
    """
    own = {f"version of {package}": version for package, version in read_versions().items()}
    # One rank per machine: git on all of them at once may take minutes on a shared file system.
    if os.environ.get("LOCAL_RANK", "0") == "0" and (own_commit := read_commit()):
        own["commit"] = own_commit
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, (socket.gethostname(), own | data_checksums(config) | all_values(config)))
    first_host, first = all_ranks[0]
    for rank, (host, other) in enumerate(all_ranks):
        if differing := [key for key in sorted(first.keys() & other.keys()) if first[key] != other[key]]:
            shown = "; ".join(f"{key}: {first[key]!r} and {other[key]!r}" for key in differing[:DIFFERENCES_SHOWN])
            raise UserError(f"ranks 0 (on {first_host}) and {rank} (on {host}) differ in {shown}")
