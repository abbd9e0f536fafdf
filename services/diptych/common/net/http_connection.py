"""Bounds what a client's connection to an HTTP server may cost, in bytes, in steps and in time.

Written data waits in a buffer of 64 KiB here and in the kernel. Once it is full, the writer has to wait; with a client
that never reads it would wait for ever, and the client would keep its place and its buffer.

For reading, uvicorn bounds only the silence between two requests. Here the silence before the first one is bounded,
too, and the time from a head's first byte to its last: a head that is late is answered with 408. The reader of a body
decides how long it may take; the rest of a body after its answer has as much time as a head.

A head's bytes are counted before the parser gets them, because the parser keeps what it can't pass on yet, and joins it
anew with each piece that comes. The same count bounds all else that is not content: the sizes and extensions of a
body's chunks, and the fields behind the last, which are ignored. Content earns new room for them, up to as much as a
head has.

Requests that come before the answers to earlier ones wait, a few of them. The last one's answer ends the connection if
more have come: its client sees which were answered.

Of too many connections one is closed, never one that has a request. Of those that have none (they are silent between
two requests, or a head is not complete) the one that has waited longest goes; where there is none, the newcomer.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import sys
import termios
from typing import Any, Final, Generic, NoReturn, TypeVar

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_UNSENT_BYTES: Final = 64 * 2**10  # in the kernel, which by itself would take megabytes for each slow client
MAX_HEAD_BYTES: Final = 32 * 2**10
MAX_FIELDS: Final = 100
MAX_URL_BYTES: Final = 8 * 2**10
MAX_WAITING_REQUESTS: Final = 16  # on a connection, behind the one that is being answered
FRAMING_PER_BYTE: Final = 8  # bytes that each byte of content may bring along: chunks of one byte have six
LINGER_S: Final = 1.0  # for a client to read why it is refused: closing at once would take the words from it
_METHOD: Final = "method"  # uvicorn adds it to the scope of a request when its head is complete
_CODES: Final = {408: "request_timeout", 503: "unavailable"}
_TOO_MUCH: Final = (
    f"the head of a request takes at most {MAX_HEAD_BYTES} bytes and {MAX_FIELDS} fields, "
    "and so does what surrounds the content of a body: send fewer, shorter fields"
)
_TOO_LONG: Final = f"the URL of a request takes at most {MAX_URL_BYTES} bytes"
_TOO_MANY: Final = "all connections of this server are in use: try again"


class ConnectionPlaces(Generic[T]):
    """The connections of one server. Each step takes the same time, however many there are."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._waiting: dict[T, None] = {}  # for a request, the longest first
        self._working: set[T] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._working)

    def enter(self, newcomer: T) -> T | None:
        """Let a connection in; return the one that has to go for it, which has lost its place, if one has to."""
        self._waiting[newcomer] = None
        if len(self) <= self.num_places:
            return None
        leaving = next(iter(self._waiting))
        del self._waiting[leaving]
        return leaving

    def begin(self, connection: T) -> None:
        """It has a request."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._working.add(connection)

    def end(self, connection: T) -> None:
        """It has none any more."""
        if connection in self._working:
            self._working.remove(connection)
            self._waiting[connection] = None

    def leave(self, connection: T) -> None:
        """It is closed."""
        self._waiting.pop(connection, None)
        self._working.discard(connection)


class HttpConnection(HttpToolsProtocol):
    """uvicorn's, which is told by the transport when the buffer is full, and when there is room again."""

    stall_s: float
    places: ConnectionPlaces[HttpConnection]
    _end: asyncio.TimerHandle | None = None
    _too_late: asyncio.TimerHandle | None = None  # for what came between two exchanges to become one
    _room = MAX_HEAD_BYTES  # for what is not content
    _num_fields = 0
    _refusal: tuple[int, str] | None = None
    _is_deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        leaving = self.places.enter(self)
        if leaving is self:
            self._is_deaf = True
            transport.write(_answer(503, _TOO_MANY))
        if leaving is not None:
            leaving.transport.close()

    def data_received(self, data: bytes) -> None:
        if len(data) <= self._room and not self._is_deaf:
            self._room -= len(data)
            super().data_received(data)
        else:
            self._feed_in_parts(memoryview(data))
        if self._is_deaf:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._too_late is None:
            self._too_late = self.loop.call_later(self.stall_s, self._give_up)

    def _feed_in_parts(self, data: memoryview) -> None:
        """Read as much at a time as there is room for: content among it makes new room."""
        begin = 0
        while begin < len(data) and not self._is_deaf:
            if self._room <= 0:
                return self._refuse(431, _TOO_MUCH)
            part = data[begin : begin + self._room]
            self._room -= len(part)
            begin += len(part)
            super().data_received(part)  # type: ignore[arg-type]  # which the parser takes as well

    # Parser callbacks
    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop_parsing(414, _TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            self._stop_parsing(431, _TOO_MUCH)
        if _METHOD not in self.scope:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_WAITING_REQUESTS:
            self._stop_parsing(503, _TOO_MANY)
        self._room = MAX_HEAD_BYTES
        super().on_headers_complete()
        self.places.begin(self)

    def on_body(self, body: bytes) -> None:
        self._room = min(MAX_HEAD_BYTES, self._room + FRAMING_PER_BYTE * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._room = MAX_HEAD_BYTES
        self._num_fields = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last:
            self.places.end(self)

    def _stop_parsing(self, status: int, words: str) -> NoReturn:
        self._refusal = (status, words)
        raise ValueError(words)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser has stopped."""
        self._refuse(*(self._refusal or (400, msg)))

    def _refuse(self, status: int, words: str) -> None:
        """Hear nothing more. Answers that are under way come first, and then there is no place for another one."""
        self._is_deaf = True
        self._stop_waiting()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True  # for whoever reads its body
            cycle.message_event.set()
            if self.pipeline:  # it waits itself
                self._refusal = (status, words)
                return
            if cycle.response_started:
                self.transport.close()
                return
        self._send_and_close(status, words)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Called by uvicorn when it is a request's turn: one that was refused meanwhile gets no other answer."""
        if self._refusal is not None and cycle.disconnected:
            self._send_and_close(*self._refusal)
        else:
            is_old = cycle.scope["http_version"] == "1.0"
            super()._start_asgi_task(cycle, _Unchunked(app, cycle) if is_old else app)  # type: ignore[arg-type]

    def _send_and_close(self, status: int, words: str) -> None:
        """What a client sends all the same is taken for a moment yet: closing now would reset the connection."""
        self.transport.write(_answer(status, words))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._too_late = self.loop.call_later(LINGER_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _give_up(self) -> None:
        if self.scope is not None and _METHOD not in self.scope:
            self._refuse(408, f"the request's head was not complete after {self.stall_s:g} s")
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep()

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self)
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


class _Unchunked:
    """An application whose answers of unknown length end with the connection: HTTP/1.0 knows no chunks."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._is_of_known_length = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pass_on(message: Message) -> None:
            self._foresee(message)
            await send(message)

        await self._app(scope, receive, pass_on)

    def _foresee(self, message: Message) -> None:
        """uvicorn adds chunks only where it knows of none, and compares each piece with what is still to come."""
        if message["type"] == "http.response.start":
            self._is_of_known_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._is_of_known_length:
                self._cycle.chunked_encoding = False
        elif not self._is_of_known_length:
            self._cycle.expected_content_length = len(message.get("body", b""))


def _answer(status: int, words: str) -> bytes:
    """Return an error in the shape of OpenAI's: what speaks to this port expects that, if anything."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": words, "type": kind, "param": None, "code": _CODES.get(status)}})
    retry = "retry-after: 1\r\n" if status == 503 else ""
    fields = f"content-type: application/json\r\n{retry}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return STATUS_LINE[status] + fields.encode() + body.encode()


def connections_of_a_server(stall_s: float, num_places: int) -> type[HttpConnection]:
    """Return the class of one server's connections: uvicorn makes them, and passes nothing on."""
    attributes: dict[str, Any] = {"stall_s": stall_s, "places": ConnectionPlaces(num_places)}
    return type("HttpConnection", (HttpConnection,), attributes)
