"""By which host others reach a server of this machine."""

from __future__ import annotations

import socket


def reachable_host(listening: str, advertised: str) -> str:
    """Return `advertised` if it is given, else the listening host, or this machine's name where that is any."""
    if advertised:
        return bracketed(advertised)
    return socket.gethostname() if listening in ("0.0.0.0", "::") else bracketed(listening)


def bracketed(host: str) -> str:
    """Return a host as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
