"""Finds the host by which others reach a server of this machine, and which host an address names.

`transfer_where` keeps a worker off the network altogether if it is reached over the loopback address only: UCX listens
on every network device by default, whatever address the worker's own ports have. NIXL moves KV by UCX, too.
"""

from __future__ import annotations

import ipaddress
import os
from typing import Final
from urllib.parse import unquote

EVERYWHERE: Final = "::"  # every address, IPv4 too
_DEVICES: Final = "UCX_NET_DEVICES"  # what is set already is the operator's choice


def is_everywhere(listening: str) -> bool:
    """Say whether a server that listens there is at every address of this machine."""
    return listening in (EVERYWHERE, "0.0.0.0", "")


def local_host(listening: str) -> str:
    """Return the address at which this machine reaches itself where it listens at `listening`."""
    return "127.0.0.1" if is_everywhere(listening) else listening  # `::1` is not always there


def reachable_host(listening: str, advertised: str) -> str:
    """Return `advertised` if it is given, else the listening host, or this machine's name where that is any."""
    if advertised:
        return bracketed(advertised)
    return os.uname().nodename if is_everywhere(listening) else bracketed(listening)


def bracketed(host: str) -> str:
    """Return a host as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def transfer_where(host: str) -> None:
    """Have this process and its children transfer KV on the loopback device if `host` is a loopback address."""
    if is_loopback(host):
        os.environ.setdefault(_DEVICES, "lo")


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(address: str) -> str:
    """Return the host of "10.0.0.1:7000", "[fd00::1]:7000" or "10.0.0.1:7000#1"; of a Unix socket, none."""
    return "" if address.startswith("unix:") else one_spelling(address.rpartition(":")[0])


def peer_host(peer: str) -> str:
    """Return the host of a caller as gRPC writes it: "ipv4:10.0.0.1:2345", "ipv6:%5Bfd00::1%5D:2345", "unix:"."""
    kind, _, address = unquote(peer).partition(":")
    return host_of(address) if kind in ("ipv4", "ipv6") else ""


def one_spelling(host: str) -> str:
    """Return an IP address in one spelling, IPv4 within IPv6 as IPv4; a name as it is."""
    try:
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return host
    return str(getattr(found, "ipv4_mapped", None) or found)
