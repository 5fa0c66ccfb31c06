"""The machines of one run: where its ranks meet, and by which interface one machine reaches another.

torch's TCP stores, where ranks meet, listen on every interface without a password, and their content decides what ranks
and launcher unpickle. So ranks of one machine meet through files in a private folder, and talk over loopback.
"""

import contextlib
import functools
import importlib
import os
import socket
import tempfile
import uuid
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from pc.errors import UserError

_PLACE = "PC_MEETING_PLACE"
"""The environment variable with the path of the private folder."""


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, seen from one of them."""

    count: int = 1
    rank: int = 0
    """The number of this machine, from 0."""
    master_addr: str = ""
    """The address of machine 0."""
    master_port: int = 29500

    @staticmethod
    def from_environment() -> "Nodes":
        """What NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say; without NNODES one machine.

        Raises:
            UserError: they are incomplete or not numbers.
        """
        given = {name: os.environ.get(name, "") for name in ("NNODES", "NODE_RANK", "MASTER_ADDR")}
        port = os.environ.get("MASTER_PORT", "29500")
        count, number = given["NNODES"] or "1", given["NODE_RANK"] or "0"
        if not (count.isdecimal() and number.isdecimal() and port.isdecimal() and int(number) < int(count)):
            raise UserError(
                f"NNODES={count}, NODE_RANK={number} and MASTER_PORT={port} should be numbers, NODE_RANK below NNODES"
            )
        if int(count) > 1 and not (given["NODE_RANK"] and given["MASTER_ADDR"]):
            raise UserError(
                f"NNODES={count} needs NODE_RANK, which starts at 0, and MASTER_ADDR, the address of node 0"
            )
        return Nodes(int(count), int(number), given["MASTER_ADDR"], int(port))

    def rendezvous(self) -> tuple[list[str], dict[str, str]]:
        """Options of torchrun, and the environment of torchrun or of a rank without it (`meet_privately`)."""
        if self.count > 1:
            place = [f"--nnodes={self.count}", f"--node-rank={self.rank}"]
            return [*place, f"--master-addr={self.master_addr}", f"--master-port={self.master_port}"], {_PLACE: ""}
        folder = tempfile.mkdtemp(dir=_private_folder().name)
        options = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={folder}/torchrun"]
        environment = {
            _PLACE: folder,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torchrun opens a store for its ranks
            "GLOO_SOCKET_IFNAME": "lo",  # even if a cluster's profile names another, for several machines
            "NCCL_SOCKET_IFNAME": "lo",
        }
        return [*options, f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1"], environment


@functools.cache
def _private_folder() -> tempfile.TemporaryDirectory:
    """A folder of this process, removed when it ends. It is on a local disk, because meeting needs file locks."""
    return tempfile.TemporaryDirectory(prefix="pc-")


def meet_privately() -> None:
    """Let the ranks of one machine meet where `Nodes.rendezvous` says, by torch's own `env://`.

    Every process of a rank calls it, also the one that torch spawns to write checkpoints, which makes its own process
    group. Elsewhere it changes nothing.
    """
    if folder := os.environ.get(_PLACE):
        import torch.distributed as dist  # takes seconds

        def create_store(host, port, rank, world_size, *_, **__) -> dist.Store:
            return dist.FileStore(f"{folder}/{port}", world_size)

        # torch has no other hook: `env://` cannot be registered again, and TorchTitan passes no init method.
        vars(importlib.import_module("torch.distributed.rendezvous")).update(_create_c10d_store=create_store)


def find_gloo_interface(peer: str) -> dict[str, str]:
    """`GLOO_SOCKET_IFNAME`: the interface through which this node reaches another; {} if that cannot be found.

    Without it gloo binds to what this node's own name resolves to, which on many systems is loopback.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # chooses a route, sends nothing
        own_address = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own_address in [one.address for one in addresses]:
                return {"GLOO_SOCKET_IFNAME": name}
    return {}
