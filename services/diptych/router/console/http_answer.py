"""An HTTP answer of another process of a router, or of another router, as it comes over a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import httptools

PIECE_BYTES: Final = 1 << 16

Header = tuple[bytes, bytes]


class HttpAnswer:
    """Reads one answer. `httptools` calls its `on_` methods. Close it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        """`head` is the request, which has no body."""
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._has_head = False
        self._is_complete = False
        self.headers: list[Header] = []
        writer.write(head)

    @property
    def status(self) -> int:
        """The status, once the head has come."""
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
        """Raises `OSError`, `HttpParserError`."""
        while not self._has_head:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises `OSError` where it is cut off, `HttpParserError`."""
        while not self._is_complete:
            if self._body:
                yield self._taken()
            await self._read()
        yield self._taken()

    def _taken(self) -> bytes:
        body, self._body = bytes(self._body), bytearray()
        return body

    async def _read(self) -> None:
        if not (piece := await self._reader.read(PIECE_BYTES)):
            raise ConnectionError("the answer was cut off")
        self._parser.feed_data(piece)
