"""Finds where a server binds, and which ports are free, or taken, before anything is started.

A port that is picked now and used later is outside the range from which the system serves requests for any port, so no
other process gets it meanwhile. The host `::` is every address, of IPv4 too; where there is no IPv6 those are all.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from random import SystemRandom
from typing import Final

from diptych.common.errors import ConfigError
from diptych.common.net.reachable import EVERYWHERE, bracketed

PICKED: Final = range(20_000, 32_768)  # Linux gives those from 32,768 on, others from 49,152


def claim(host: str, port: int, *, flag: str) -> int:
    """Return `port`, or for 0 one that is free now. Raises `ConfigError`, naming the flag, if it cannot be used."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} must be between 0 and 65535, not {port}")
    if port == 0:
        return free_port(host)
    family, bound = binding(host)
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bound, port))
        except OSError as error:
            advice = f"stop what uses it, or choose another port with {flag} ({flag} 0 picks a free one)"
            raise ConfigError(f"can't listen on {bracketed(host)}:{port} ({error.strerror}): {advice}") from None
    return port


def reserve_port(host: str) -> socket.socket:
    """Return a socket that keeps a port for processes that listen there with SO_REUSEPORT, while it is open."""
    family, bound = binding(host)
    keeper = socket.socket(family)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keeper.bind((bound, 0))
    return keeper


def claim_for_processes(host: str, port: int, *, flag: str) -> socket.socket:
    """Claim `port` for processes that will listen there with SO_REUSEPORT, for as long as the returned socket is open.

    The system would let everybody in who listens in this way, and split connections between strangers. So a name beside
    the port is taken, which one only can have in the network of this machine or pod. Raises `ConfigError`.
    """
    claim(host, port, flag=flag)
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0diptych/tcp/{host}/{port}")
    except OSError as error:
        name.close()
        advice = f"stop it, or choose another port with {flag}"
        words = f"another router runs, or starts, at {bracketed(host)}:{port} ({error.strerror}): {advice}"
        raise ConfigError(words) from None
    return name


def free_port(host: str = "127.0.0.1") -> int:
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int) -> list[int]:
    """Return ports that are free now, each another one. Raises `ConfigError` if nobody can listen on the host."""
    with ExitStack() as stack:
        return [int(stack.enter_context(_bound(host)).getsockname()[1]) for _ in range(count)]


def _bound(host: str) -> socket.socket:
    reason = ""
    family, bound = binding(host)
    for port in SystemRandom().sample(PICKED, 100):
        probe = socket.socket(family)
        try:
            probe.bind((bound, port))
        except OSError as error:
            reason = str(error.strerror)
            probe.close()
        else:
            return probe
    raise ConfigError(f"can't listen on {host} ({reason}), on none of a hundred ports")


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
