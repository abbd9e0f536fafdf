"""Finds the host by which others reach a server of this machine."""

from __future__ import annotations

import platform
from typing import Final

EVERYWHERE: Final = "::"  # every address, IPv4 too


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
    return platform.node() if is_everywhere(listening) else bracketed(listening)


def bracketed(host: str) -> str:
    """Return a host as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
