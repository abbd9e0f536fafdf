"""Keeps a worker off the network altogether if it is reached over the loopback address only.

UCX listens on every network device by default, whatever address the worker's own ports have. NIXL moves KV by UCX, too.
"""

from __future__ import annotations

import ipaddress
import os
from typing import Final

_DEVICES: Final = "UCX_NET_DEVICES"  # what is set already is the operator's choice


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
