"""Network addresses: those of this machine, and of others."""

import socket
import struct
import sys

from learnerkit.clusters.place import parse_endpoint as parse_endpoint
from learnerkit.processes.machine import LOOPBACK_INTERFACE

ANYWHERE = "192.0.2.1"  # TEST-NET-1 (RFC 5737): no machine has this address, but the kernel has a route to it
SIOCGIFADDR = 0x8915  # from <linux/sockios.h>: the IPv4 address of a network interface


class NodeError(Exception):
    """The nodes do not find each other, or do not fit together; the message says why, and what to do."""


def family_of(address: str) -> int:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_address(host: str, port: int) -> str:
    """Return the address from which this machine would connect to a host.

    This machine's own name may stand for a loopback address (127.0.1.1 on Debian), which no other machine can reach;
    return the address for connections to the rest of the world then.

    Raises:
        NodeError: the name is unknown, or there is no route.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise NodeError(f"the name {host!r} is unknown here ({error.strerror or error})") from error
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(address)  # sends nothing: the kernel looks for a route
        except OSError as error:
            raise NodeError(f"there is no route from here to {host} ({error.strerror or error})") from error
        own: str = probe.getsockname()[0]
    if own.startswith("127.") and not host.startswith(("127.", "localhost")):
        return own_address(ANYWHERE, port)
    return own


def resolves(host: str) -> bool:
    """Tell whether a name has an address by now; some clusters start machines before their names are known."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def is_own(host: str) -> bool:
    """Tell whether an address is one of this machine's: then, and only then, a socket can be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an IPv4 address, for gloo and NCCL; `None`: not found."""
    if address.startswith("127."):
        return LOOPBACK_INTERFACE
    if sys.platform != "linux" or ":" in address:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
