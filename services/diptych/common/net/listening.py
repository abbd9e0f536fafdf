"""Decides where a server binds when it is told to listen at a host. Pure but for asking whether there is IPv6.

`::` is every address, of IPv4 too; where there is no IPv6 those are all.
"""

from __future__ import annotations

import socket

from diptych.common.net.reachable import EVERYWHERE


def binding(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family of a socket that listens at `host`, and what to bind it to."""
    if host == EVERYWHERE and not _has_ipv6():
        return socket.AF_INET, "0.0.0.0"
    return socket.AF_INET6 if ":" in host else socket.AF_INET, host


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return False
    return True
