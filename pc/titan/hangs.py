"""A collective that does not end: its name, and the ranks that did not get to it.

Gloo says that it timed out, and nothing more. Every rank that meets this notes it in the store of the process group, and
those that have noted nothing some seconds later are the ones that the others waited for. NCCL's watchdog ends the
process itself; what it leaves is in docs/faults.md.
"""

import re
import socket
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

SECONDS = 5.0
"""Between the first rank's timeout and the last one's, at most."""

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_LOST = re.compile(r"gloo|connection", re.IGNORECASE)


class CollectiveHangs(RuntimeError):
    """Ranks did not come to a collective. It is no mistake of the user's: a job that met it is tried again."""


def explain(error: RuntimeError, step: int) -> CollectiveHangs | None:
    """What a failed collective's error should have said; None if it is no collective's, or did not wait in vain."""
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
    hosts = [_host(store, rank) for rank in missing]
    who = ", ".join(f"{rank} (on {host})" for rank, host in zip(missing, hosts, strict=True))
    came = f"these ranks did not come to it: {who}" if missing else "every rank came to it, or to another one"
    caller = next(frame for frame in reversed(frames) if "/torch/" not in frame.filename.replace("\\", "/"))
    place = f"{caller.name}, {'/'.join(Path(caller.filename).parts[-2:])}:{caller.lineno}"
    return CollectiveHangs(f"{own[-1]} ({place}) timed out in step {step}; {came}")


def introduce() -> None:
    """Note this rank's host, before anything can hang. A pretended process group has nobody to tell."""
    if dist.get_backend() == "fake":
        return
    _get_default_store().set(f"host/{dist.get_rank()}", socket.gethostname())


def _host(store: dist.Store, rank: int) -> str:
    return store.get(f"host/{rank}").decode() if store.check([f"host/{rank}"]) else "unknown"
