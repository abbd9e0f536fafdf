"""Has the viewers of a router of several processes look at its first one, whichever of them they reached.

To look costs a process as much for one viewer as for many: it follows all workers and looks at each topic. So one
process does it for all, and the others hand its bytes on. While the first does not answer, or leaves, each serves its
own viewers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Protocol

import httptools
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.router.console.http_answer import Header, HttpAnswer
from diptych.router.http.exchange.disconnect import until_disconnect

PATIENCE_S: Final = 1.0  # until its head has come
MOST_UNREAD_BYTES: Final = 1 << 16  # of a stream whose viewer takes too little: the first process drops it
UNAVAILABLE: Final = 503  # it is being drained, or has too many viewers
OF_A_CONNECTION: Final = frozenset(
    {b"connection", b"content-length", b"date", b"expect", b"server", b"te", b"transfer-encoding", b"upgrade"}
)


class Elsewhere(Protocol):
    """Who looks for the viewers of this process, if another does."""

    async def stream(self, request: Request) -> Response | None:
        """Return the stream of who does; None where this process has to look itself."""
        ...

    def close(self) -> None:
        """End what is handed on, and hand on nothing more: this process leaves."""
        ...


class NobodyElse:
    """Implements `Elsewhere` in a router of one process, and in the first of several."""

    async def stream(self, request: Request) -> Response | None:
        return None

    def close(self) -> None:
        pass


class FirstProcess:
    """Implements `Elsewhere`: the process at `address`, a host and a port."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._streams: set[HttpAnswer] = set()
        self._is_closed = False

    async def stream(self, request: Request) -> Response | None:
        if self._is_closed or request.method != "GET":
            return None
        try:
            stream = await _opened(self._address, _head(request.scope))
        except (OSError, TimeoutError, httptools.HttpParserError):
            return None
        if self._is_closed or stream.status == UNAVAILABLE:
            stream.close()
            return None
        return _HandedOn(stream, self._streams)

    def close(self) -> None:
        self._is_closed = True
        for stream in self._streams:
            stream.close()


class _HandedOn(Response):
    """Sends what comes of another process. No word to `Response`: its own body and headers are not sent."""

    def __init__(self, stream: HttpAnswer, running: set[HttpAnswer]) -> None:
        """The stream is among those that run until the viewer has it no more."""
        self._stream = stream
        self._running = running
        running.add(stream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        finally:
            self._running.discard(self._stream)
            self._stream.close()

    async def _send(self, send: Send) -> None:
        headers = [header for header in self._stream.headers if header[0] not in OF_A_CONNECTION]
        await send({"type": "http.response.start", "status": self._stream.status, "headers": headers})
        with suppress(OSError, httptools.HttpParserError):  # cut off: the viewer comes again for a snapshot
            async for piece in self._stream.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _opened(address: tuple[str, int], head: bytes) -> HttpAnswer:
    """Return the answer to a request. Raises `OSError`, `TimeoutError`, `HttpParserError`."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(sock=await _connected(address), limit=MOST_UNREAD_BYTES)
        stream = HttpAnswer(reader, writer, head)
        try:
            await stream.read_head()
        except BaseException:
            stream.close()
            raise
        return stream


async def _connected(address: tuple[str, int]) -> socket.socket:
    """Return a socket in which little waits to be read."""
    made = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MOST_UNREAD_BYTES)
    try:
        await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made


def _head(scope: Scope) -> bytes:
    """Return the request as it came, for a connection of its own."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    headers: Iterable[Header] = scope["headers"]
    lines = [b"GET " + scope["path"].encode() + query + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in headers if name not in OF_A_CONNECTION]
    return b"\r\n".join([*lines, b"connection: close", b"", b""])
