"""Compares settings, versions and data of all ranks at the start, before a difference can make a collective hang."""

import os
import platform
import socket
from typing import Any

import torch.distributed as dist

from pc.errors import UserError
from pc.settings import Config
from pc.settings.identity import contents, everything
from pc.titan.environment import commit, versions

SHOWN = 4


def identity(config: Config) -> dict[str, Any]:
    """What must be the same on every rank: settings, versions, commit, and the data's checksums."""
    found = {"python": platform.python_version()}
    # One rank per machine: git on all of them at once may take minutes on a shared file system.
    if os.environ.get("LOCAL_RANK", "0") == "0" and (known := commit()):
        found["commit"] = known
    found |= {f"version of {package}": version for package, version in versions().items()}
    return found | contents(config) | everything(config)


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
