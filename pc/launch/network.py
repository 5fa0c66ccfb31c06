"""The network between the nodes of a run."""

import contextlib
import fcntl
import socket
import struct

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def gloo_interface(peer: str) -> dict[str, str]:
    """`GLOO_SOCKET_IFNAME`: the interface through which this node reaches another; {} if that cannot be found.

    Without it gloo binds to what this node's own name resolves to, which on many systems is loopback.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # chooses a route, sends nothing
        mine = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == mine:
                    return {"GLOO_SOCKET_IFNAME": name}
    return {}
