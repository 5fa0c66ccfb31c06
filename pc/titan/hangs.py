"""Explains a collective that hangs: its name, and the ranks that did not reach it.

Gloo reports only a timeout. Every rank that times out records it in the process group's store. The ranks that have
recorded nothing a few seconds later are those that the others waited for. NCCL's watchdog kills the
process itself; docs/faults.md describes what it reports.
"""

import re
import socket
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

SECONDS = 5.0
"""Maximum time between the first and the last rank's timeout."""

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_LOST = re.compile(r"gloo|connection", re.IGNORECASE)


class CollectiveHangs(RuntimeError):
    """Some ranks did not reach a collective. Not a user error: the launcher retries the job."""


def explain(error: RuntimeError, step: int) -> CollectiveHangs | None:
    """A better error for a collective that timed out; None if `error` is not from a collective or not a timeout."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f.name for f in frames if "/torch/distributed/" in f.filename.replace("\\", "/") and f.name != "wrapper"]
    timed_out = bool(_TIMED_OUT.search(str(error)))
    if not own or not (timed_out or _LOST.search(str(error))):
        return None
    store, me, everyone = _get_default_store(), dist.get_rank(), range(dist.get_world_size())
    store.set(f"hangs/{me}", "")
    if not timed_out:
        return None
    deadline = time.monotonic() + SECONDS
    while (
        missing := [rank for rank in everyone if not store.check([f"hangs/{rank}"])]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts = [store.get(f"host/{r}").decode() if store.check([f"host/{r}"]) else "unknown" for r in missing]
    who = ", ".join(f"{rank} (on {host})" for rank, host in zip(missing, hosts, strict=True))
    came = f"these ranks did not reach it: {who}" if missing else "every rank reached it, or another collective"
    caller = next(frame for frame in reversed(frames) if "/torch/" not in frame.filename.replace("\\", "/"))
    place = f"{caller.name}, {'/'.join(Path(caller.filename).parts[-2:])}:{caller.lineno}"
    return CollectiveHangs(f"{own[-1]} ({place}) timed out in step {step}; {came}")


def introduce() -> None:
    """Record this rank's host before anything can hang; not for a fake process group."""
    if dist.get_backend() == "fake":
        return
    _get_default_store().set(f"host/{dist.get_rank()}", socket.gethostname())
