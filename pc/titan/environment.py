"""Writes `environment.json` in a run's folder, for reproducing its results."""

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from pc.common.files import write_atomically
from pc.settings import Config
from pc.settings.identity import contents

PACKAGES = ("torch", "torchtitan", "datasets", "lm-eval", "transformers", "numpy", "pc-layer")


def write_environment(folder: str | Path, config: Config, world_size: int) -> None:
    """Write hardware, versions, commit and what the data contain to `environment.json`."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    content = {
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
        "data": contents(config),
        "gpus": gpus,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "world_size": world_size,
    }
    write_atomically(Path(folder) / "environment.json", json.dumps(content, indent=1) + "\n")


def versions() -> dict[str, str | None]:
    """Versions of the packages that affect a run's results; None if not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """The git commit of this code, with "+" if files differ from it; None outside a git checkout."""
    here = Path(__file__).parent
    answers = []
    for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            git = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if git.returncode:
            return None
        answers.append(git.stdout.strip())
    return answers[0] + ("+" if answers[1] else "")
