"""The machines of one run: where they meet, and by which interface one reaches another."""

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from pc.errors import UserError

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, seen from one of them."""

    count: int = 1
    rank: int = 0
    """The number of this machine, from 0 on."""
    master_addr: str = ""
    """The address of machine 0."""
    master_port: int = 29500

    @staticmethod
    def from_environment() -> "Nodes":
        """What NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say; without NNODES one machine.

        Raises:
            UserError: they are incomplete or no numbers.
        """
        given = {name: os.environ.get(name, "") for name in ("NNODES", "NODE_RANK", "MASTER_ADDR")}
        port = os.environ.get("MASTER_PORT", "29500")
        count, number = given["NNODES"] or "1", given["NODE_RANK"] or "0"
        if not (count.isdecimal() and number.isdecimal() and port.isdecimal() and int(number) < int(count)):
            raise UserError(
                f"NNODES={count}, NODE_RANK={number} and MASTER_PORT={port} should be numbers, NODE_RANK below NNODES"
            )
        if int(count) > 1 and not (given["NODE_RANK"] and given["MASTER_ADDR"]):
            raise UserError(f"NNODES={count} needs NODE_RANK, from 0 on, and MASTER_ADDR, the address of node 0")
        return Nodes(int(count), int(number), given["MASTER_ADDR"], int(port))

    def rendezvous(self) -> list[str]:
        """Options of torchrun; [] for one machine."""
        if self.count == 1:
            return []
        place = [f"--nnodes={self.count}", f"--node-rank={self.rank}"]
        return [*place, f"--master-addr={self.master_addr}", f"--master-port={self.master_port}"]


def find_gloo_interface(peer: str) -> dict[str, str]:
    """`GLOO_SOCKET_IFNAME`: the interface through which this node reaches another; {} if that cannot be found.

    Without it gloo binds to what this node's own name resolves to, which on many systems is loopback.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # chooses a route, sends nothing
        own_address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(request[20:24]) == own_address:
                    return {"GLOO_SOCKET_IFNAME": name}
    return {}
