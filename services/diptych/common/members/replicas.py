"""Finds the bootstrap replicas: addresses as they are given, and every address behind `dns:///NAME:PORT`.

Rule: a name is resolved again and again. A new replica gets a task, and one that is gone loses it; while the name can't
be resolved, everything stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.common.net.reachable import bracketed

logger = logging.getLogger(__name__)

NAME: Final = "dns:///"
SCHEMES: Final = ("dns:", "ipv4:")  # that gRPC takes; `NAME` is looked up here
RESOLVE_S: Final = 5.0  # how often names are resolved

Resolve = Callable[[str, int], Sequence[str]]  # host and port to addresses; blocks; raises `OSError`


def resolve(host: str, port: int) -> Sequence[str]:
    """Return every address behind a name, of the family that this machine prefers: a replica may have one of each."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [f"{bracketed(str(at[0]))}:{port}" for family, _, _, _, at in found if family == found[0][0]]


def check_replicas(given: Sequence[str]) -> None:
    """Raise `ConfigError` unless there is an address, and each has a port."""
    if not given:
        raise ConfigError("--bootstrap names no replica: give host:port")
    for address in given:
        host, port = _parts(address)
        has_port = not _is_bare_ipv6(address) and port.isdecimal() and int(port) < 2**16
        if not (has_port and _can_be_asked_for(host)):
            raise ConfigError(f"--bootstrap takes host:port, [IPv6]:port or {NAME}NAME:PORT, not {address!r}")


def replicas_of(given: Sequence[str], resolve: Resolve = resolve) -> list[str]:
    """Return the replicas of now. Blocks. Raises `ConfigError` for a name that can't be resolved."""
    check_replicas(given)
    try:
        return _distinct(_behind(address, resolve) for address in given)
    except OSError as error:
        raise ConfigError(f"can't resolve {' or '.join(filter(_is_name, given))}: {error}") from error


class Replicas:
    """The replicas as they come and go."""

    def __init__(self, given: Sequence[str], resolve: Resolve = resolve, interval_s: float = RESOLVE_S) -> None:
        self._behind: dict[str, Sequence[str]] = {each: () if _is_name(each) else (each,) for each in given}
        self._resolve = resolve
        self._interval_s = interval_s
        self._failed: set[str] = set()  # names, when they were resolved last

    @property
    def known(self) -> list[str]:
        """Their addresses, as of the last time that they were looked for."""
        return _distinct(self._behind.values())

    async def run(self, serve: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Run `serve(address)` for each replica while it is one, until cancelled. Raises what one of them raises."""
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.gather(*(self._look(name) for name in self._names))
                for address in tasks.keys() - set(self.known):
                    tasks.pop(address).cancel()
                for address in self.known:
                    if address not in tasks:
                        tasks[address] = asyncio.ensure_future(serve(address))
                await self._pause(tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()

    @property
    def _names(self) -> list[str]:
        return [address for address in self._behind if _is_name(address)]

    async def _look(self, name: str) -> None:
        try:
            self._behind[name] = await asyncio.to_thread(_behind, name, self._resolve)
            self._failed.discard(name)
        except OSError as error:
            if name not in self._failed:
                logger.warning("can't resolve %s (%s): going on with the replicas that are known", name, error)
            self._failed.add(name)

    async def _pause(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Wait until names are to be resolved again. Raises what a task raises, and not before."""
        until = asyncio.ensure_future(asyncio.sleep(self._interval_s))
        try:
            while not until.done():
                for task in filter(asyncio.Task.done, tasks):
                    task.result()
                running = [task for task in tasks if not task.done()]
                await asyncio.wait([until, *running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            until.cancel()


def _is_name(address: str) -> bool:
    return address.startswith(NAME)


def _is_bare_ipv6(address: str) -> bool:
    """Whether gRPC would take all of it for a host, and ask port 443: an IPv6 address ends at its bracket."""
    return address.count(":") > 1 and "[" not in address and not address.startswith(SCHEMES)


def _can_be_asked_for(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:  # an empty or too long part
        return False


def _parts(name: str) -> tuple[str, str]:
    host, _, port = name.removeprefix(NAME).rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def _behind(address: str, resolve: Resolve) -> Sequence[str]:
    if not _is_name(address):
        return (address,)
    host, port = _parts(address)
    return resolve(host, int(port))


def _distinct(addresses: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(address for some in addresses for address in some))
