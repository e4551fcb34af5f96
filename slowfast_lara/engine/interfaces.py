"""Choice of the network interface for gloo and NCCL.

By default, gloo binds to the address of the host name, which is 127.0.1.1 on Debian and Ubuntu, so
that other nodes cannot connect. NCCL takes the first interface that it finds.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux ioctl that returns the IPv4 address of an interface
_DOCUMENTATION = "192.0.2.1"  # an address (RFC 5737) that is reached through the default route


def choose_interface(host: str) -> str:
    """Let gloo and NCCL use the interface that routes to a host, unless the user has chosen one.

    Returns the name of the interface that routes to the host, even if the user has chosen another.
    If it is unknown, returns "" and sets no variable.
    """
    name = interface_to(host)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # `=`: exact match
    return name


def interface_to(host: str) -> str:
    """Name of the interface that sends packets to an IPv4 host; "" if unknown."""
    address = _source_address(host)
    is_loopback = address and ipaddress.ip_address(address).is_loopback
    # Debian maps a machine's own host name to a loopback address.
    if is_loopback and host != "localhost" and not host.startswith("127."):
        address = _source_address(_DOCUMENTATION)
    for _, name in socket.if_nameindex() if address else []:
        if _address_of(name) == address:
            return name
    # All addresses 127.x.y.z belong to the loopback interface, although it lists only one.
    return "lo" if address.startswith("127.") and _address_of("lo") else ""


def _source_address(host: str) -> str:
    """The address from which packets to a host are sent; "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # for UDP, this only chooses the route and sends no packet
        except OSError:
            return ""
        return probe.getsockname()[0]


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface; "" if it has none, or if the system is not Linux."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode())
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    except (ImportError, OSError):
        return ""
