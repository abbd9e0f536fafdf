"""Finds which host an address names, however it is written. Pure."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote


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
