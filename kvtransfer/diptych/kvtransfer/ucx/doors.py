"""Keeps strangers from the ports that UCX listens on, by the kernel: UCX believes whoever gets a connection.

A filter drops packets of other hosts before there is a connection. Connections keep the filter that they came in by.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Final, TypeVar

from diptych.kvtransfer.metadata import Address
from diptych.kvtransfer.ucx.source_filter import Program, programs

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_ATTACH_FILTER: Final = 26  # SO_*
_DETACH_FILTER: Final = 27
_DESCRIPTORS: Final = Path("/proc/self/fd")


def opened_by(make: Callable[[], Made]) -> tuple[Made, list[socket.socket]]:
    """Return what `make` returns, and the ports that it began to listen on, as sockets of ours."""
    before = set(_sockets())
    made = make()
    found = [socket.socket(fileno=os.dup(each)) for name, each in _sockets().items() if name not in before]
    doors = [each for each in found if _listens(each)]
    for other in set(found) - set(doors):
        other.close()
    return made, doors


class Doors:
    """The ports of one UCX. Shut to everybody from the start."""

    def __init__(self, listeners: Iterable[socket.socket]) -> None:
        self._listeners = list(listeners)
        self._admitted: Set[Address] | None = None
        self.are_open = False  # to anybody
        self.admit(frozenset())

    def admit(self, addresses: Set[Address] | None) -> None:
        """Let packets of these addresses in, and no others; None: all."""
        if addresses == self._admitted and self._admitted is not None:
            return
        self._admitted = addresses
        was_open = self.are_open
        self.are_open = not all([self._narrow(each, addresses) for each in self._listeners])
        if self.are_open and not was_open:
            logger.warning("anybody who reaches the port of KV transfers gets a connection: %s", self._why(addresses))

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _narrow(self, listener: socket.socket, addresses: Set[Address] | None) -> bool:
        """Return whether the kernel takes a filter; without one, all of them are let in, as peers must be."""
        if addresses is not None and any(_attached(listener, program) for program in programs(addresses)):
            return True
        with contextlib.suppress(OSError):  # there was none
            listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        return False

    def _why(self, addresses: Set[Address] | None) -> str:
        if addresses is None:
            return "a peer of an older version does not say where it is"
        return f"the kernel takes no filter of {len(addresses)} addresses"


def addresses_of(lines: str) -> frozenset[Address]:
    """Return addresses that are written one a line."""
    return frozenset(map(ipaddress.ip_address, lines.split()))


def _attached(listener: socket.socket, program: Program) -> bool:
    code = ctypes.create_string_buffer(b"".join(each.packed() for each in program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))
    except OSError:
        return False
    return True


def _sockets() -> dict[str, int]:
    """Descriptors by the kernel's name of the socket: numbers are used again."""
    found: dict[str, int] = {}
    for each in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # it is gone
            if (name := os.readlink(each)).startswith("socket:"):
                found[name] = int(each.name)
    return found


def _listens(candidate: socket.socket) -> bool:
    is_internet = candidate.family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
