"""Reads UCX's description of an endpoint: over which transports its lanes run."""

from __future__ import annotations

import re

_TRANSPORT = re.compile(r"lane\[\d+\]:\s+\d+:([^/\s]+)/(\S+)")


def lane_names(description: str) -> str:
    """Return each lane's transport and device once, such as `sysv/memory, tcp/lo`; the whole text if none is found."""
    names = [f"{transport}/{device}" for transport, device in _TRANSPORT.findall(description)]
    return ", ".join(dict.fromkeys(names)) or description.strip()
