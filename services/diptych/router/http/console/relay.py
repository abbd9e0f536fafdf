"""Has the viewers of a router of several processes look at its first one, whichever of them they reached.

To look costs a process as much for one viewer as for many: it follows all workers and looks at each topic. So one
process does it for all, and the others hand its bytes on. While the first does not answer, or leaves, each serves its
own viewers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.router.http.exchange.disconnect import until_disconnect

PATH: Final = "/console/api/stream"
PATIENCE_S: Final = 1.0  # until its head has come
PIECE_BYTES: Final = 1 << 16
UNAVAILABLE: Final = 503  # it is being drained, or has too many viewers
OF_A_CONNECTION: Final = frozenset({b"connection", b"content-length", b"date", b"server", b"transfer-encoding"})

Header = tuple[bytes, bytes]


def with_viewers_at(address: tuple[str, int], app: ASGIApp) -> ASGIApp:
    """Return `app` of a process that is not the one at `address`, whose streams of the console are that one's."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("GET", PATH):
            return await app(scope, receive, send)
        try:
            stream = await _opened(address, _head(scope))
        except (OSError, TimeoutError, httptools.HttpParserError):
            return await app(scope, receive, send)
        try:
            if stream.status == UNAVAILABLE:
                return await app(scope, receive, send)
            await until_disconnect(receive, _hand_on(stream, send))
        finally:
            stream.close()

    return serve


class _Stream:
    """An answer of another process, of which the head has come: what `httptools` calls."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._has_head = False
        self._is_complete = False
        self.headers: list[Header] = []

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        self._is_complete = True

    def close(self) -> None:
        self._writer.close()

    async def read_head(self) -> None:
        """Raises `ConnectionError`, `HttpParserError`."""
        while not self._has_head:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. One that is cut off ends: the viewer comes again for a snapshot."""
        while not self._is_complete:
            if self._body:
                yield self._taken()
            try:
                await self._read()
            except (OSError, httptools.HttpParserError):
                break
        yield self._taken()

    def _taken(self) -> bytes:
        body, self._body = bytes(self._body), bytearray()
        return body

    async def _read(self) -> None:
        if not (piece := await self._reader.read(PIECE_BYTES)):
            raise ConnectionError("the answer was cut off")
        self._parser.feed_data(piece)


async def _opened(address: tuple[str, int], head: bytes) -> _Stream:
    """Return the answer to a request. Raises `OSError`, `TimeoutError`, `HttpParserError`."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*address)
        stream = _Stream(reader, writer)
        try:
            writer.write(head)
            await stream.read_head()
        except BaseException:
            stream.close()
            raise
        return stream


def _head(scope: Scope) -> bytes:
    """Return the request as it came, for a connection of its own."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    headers: Iterable[Header] = scope["headers"]
    lines = [b"GET " + PATH.encode() + query + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in headers if name not in OF_A_CONNECTION]
    return b"\r\n".join([*lines, b"connection: close", b"", b""])


async def _hand_on(stream: _Stream, send: Send) -> None:
    headers = [header for header in stream.headers if header[0] not in OF_A_CONNECTION]
    await send({"type": "http.response.start", "status": stream.status, "headers": headers})
    async for piece in stream.pieces():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
