"""`status.json` of a run folder: what a launcher, a person or a requeued job needs to know."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from pc.files import write_atomically

PACKAGES = ("torch", "torchtitan", "datasets", "lm-eval", "transformers", "numpy", "pc-layer")


def write_status(folder: str | Path, state: str, step: int, steps: int, reason: str = "") -> None:
    """state: running, stopped, finished or failed; reason: why it stopped or failed, in a line."""
    content = {"state": state, "step": step, "steps": steps, "reason": reason}
    write_atomically(Path(folder) / "status.json", json.dumps(content) + "\n")


def write_failure(folder: str | Path, step: int, steps: int, reason: str) -> None:
    """Say that the run failed; a finished run stays finished, whatever was tried in its folder afterwards."""
    file = Path(folder) / "status.json"
    if not file.exists() or json.loads(file.read_text())["state"] != "finished":
        write_status(folder, "failed", step, steps, reason)


def write_environment(folder: str | Path, world_size: int) -> None:
    """`environment.json`: hardware and versions that made the run's figures."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    content = {
        "python": platform.python_version(),
        "versions": versions,
        "gpus": gpus,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "world_size": world_size,
    }
    write_atomically(Path(folder) / "environment.json", json.dumps(content, indent=1) + "\n")
