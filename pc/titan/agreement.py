"""Compares settings, versions and data of all ranks at the start, before a difference can make a collective hang."""

import json
import os
import platform
import socket
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from pc.data import Manifest
from pc.errors import UserError
from pc.titan.config import JobConfig
from pc.titan.environment import commit, versions

SHOWN = 4


def identity(config: JobConfig) -> dict[str, Any]:
    """What must be the same on every rank: settings, versions, commit, and the data's checksums."""
    found = {"python": platform.python_version()}
    # One rank per machine: git on all of them at once may take minutes on a shared file system.
    if os.environ.get("LOCAL_RANK", "0") == "0" and (known := commit()):
        found["commit"] = known
    found |= {f"version of {package}": version for package, version in versions().items()}
    found |= {f"content of {key} = {path}": _content(path) for key, path in _data_folders(config)}
    return found | dict(_flat(asdict(config)))


def require_agreement(mine: dict[str, Any]) -> None:
    """Compare what both know with rank 0. All ranks must call it; all raise or none.

    Raises:
        UserError: names the first rank that differs, its host, and what differs, with both values.
    """
    if dist.get_world_size() == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), mine))
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        different = [key for key in first.keys() & other.keys() if first.get(key) != other.get(key)]
        if different:
            shown = "; ".join(f"{key}: {first.get(key)!r} and {other.get(key)!r}" for key in sorted(different)[:SHOWN])
            more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
            raise UserError(f"ranks 0 (on {first_host}) and {rank} (on {host}) differ in {shown}{more}")


def _data_folders(config: JobConfig) -> list[tuple[str, str]]:
    return [("data.path", config.data.path), ("data.validation_path", config.data.validation_path or config.data.path)]


def _content(path: str) -> str | None:
    try:
        return Manifest.read(path).configuration_sha256
    except UserError:
        return None  # reported when the data are opened


def _flat(section: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Every `section.key` with its value as text."""
    pairs = []
    for key, value in section.items():
        if isinstance(value, dict) and key != "level":
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, json.dumps(value, default=str)))
    return pairs
