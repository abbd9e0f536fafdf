"""A client's connection to an HTTP server: ends when the client is silent, or deaf, for too long.

What is written waits in a buffer of 64 KiB here and in the kernel. Once it is full whoever writes has to wait, and that
would be for ever with a client that never reads: it would keep its place, and its buffer.

Of what is read uvicorn bounds only the silence between two requests. Here that before the first one is bounded, too,
and the time from a head's first byte to its last: a head that is late is answered with 408. How long a body may take
decides who reads it; what comes of one after its answer has as much time as a head.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES: Final = 64 * 2**10  # in the kernel, which by itself would take megabytes for each slow client
_LATE: Final = "HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\nconnection: close\r\n"


class HttpConnection(HttpToolsProtocol):
    """uvicorn's, which is told by the transport when the buffer is full, and when there is room again."""

    stall_s = 60.0
    _end: asyncio.TimerHandle | None = None
    _too_late: asyncio.TimerHandle | None = None  # for what came between two exchanges to become one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._too_late is None:
            self._too_late = self.loop.call_later(self.stall_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _give_up(self) -> None:
        if self.scope is not None and "method" not in self.scope:  # uvicorn adds it to a head that is complete
            words = f"the request's head was not complete after {self.stall_s:g} s"
            self.transport.write(f"{_LATE}content-length: {len(words)}\r\n\r\n{words}".encode())
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep()

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep()
        self._stop_waiting()
        super().connection_lost(exc)

    def _keep(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _watch(self) -> None:
        self._end = self.loop.call_later(self.stall_s, self._look, self._untaken_bytes())

    def _look(self, untaken_bytes: int) -> None:
        if self._untaken_bytes() < untaken_bytes:
            self._watch()
            return
        logger.info("cut off a client that took nothing for %g s", self.stall_s)
        self.transport.abort()

    def _untaken_bytes(self) -> int:
        """How much waits here and in the kernel: while the buffer is full, less means that the client takes some."""
        unacknowledged = fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(unacknowledged, sys.byteorder)


def connections_that_stall(stall_s: float) -> type[HttpConnection]:
    """Return the class of connections that end after `stall_s`: uvicorn makes them, and passes nothing on."""
    attributes: dict[str, Any] = {"stall_s": stall_s}
    return type("HttpConnection", (HttpConnection,), attributes)
