"""Asks a server of OpenAI's API, one connection a call: a whole JSON answer, or a stream of events with their times.

Written on `httptools` and asyncio's streams: what a client does between two bytes is what it measures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from diptych.common.errors import ConfigError, DiptychError

READ_BYTES: Final = 1 << 16
MAX_ERROR_CHARS: Final = 300
DATA: Final = b"data:"


class ServerError(DiptychError):
    """The server did not answer as it should, or nobody is there."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where, and with which key."""

    url: str  # http://host:port, with the path in front of /v1 if there is one
    api_key: str = ""
    timeout_s: float = 600.0  # of a call

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no address of a server: give http://HOST:PORT")

    @property
    def root(self) -> str:
        """The address without what clients of OpenAI's write behind it."""
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(slots=True)
class _Answer:
    """Implements httptools' protocol."""

    status: int = 0
    is_complete: bool = False
    pieces: list[bytes] = field(default_factory=list)
    parser: Any = None

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.is_complete = True


async def fetch(server: Server, method: str, path: str, body: object = None) -> Any:
    """Return what the JSON of an answer says. Raises `ServerError`."""
    pieces = bytearray()
    await exchange(server, method, path, body, pieces.extend)
    try:
        return json.loads(bytes(pieces))
    except ValueError:
        raise ServerError(f"{method} {path}: the answer is no JSON") from None


async def events(server: Server, path: str, body: object, on_event: Callable[[Mapping[str, Any]], None]) -> None:
    """Call `on_event` with each event of a stream as it comes. Raises `ServerError`, for an event of an error too."""
    rest = bytearray()

    def on_piece(piece: bytes) -> None:
        rest.extend(piece)
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end]).strip()
            del rest[: end + 1]
            if line.startswith(DATA) and (text := line[len(DATA) :].strip()) != b"[DONE]":
                on_event(_event(text))

    await exchange(server, "POST", path, body, on_piece)


def _event(text: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        raise ServerError("an event of the stream is no JSON") from None
    if not isinstance(event, Mapping):
        raise ServerError("an event of the stream is no object")
    if event.get("error"):
        raise ServerError(f"the stream ended: {_words(event)}")
    return event


async def exchange(server: Server, method: str, path: str, body: object, on_piece: Callable[[bytes], None]) -> None:
    """Send a request and hand on its body as it comes. Raises `ServerError` unless the status is 200."""
    try:
        async with asyncio.timeout(server.timeout_s), _connected(server) as (reader, writer):
            writer.write(_request(server, method, path, body))
            answer = _Answer()
            answer.parser = httptools.HttpResponseParser(answer)
            while not answer.is_complete and (data := await reader.read(READ_BYTES)):
                answer.parser.feed_data(data)
                while answer.status == 200 and answer.pieces:
                    on_piece(answer.pieces.pop(0))
    except TimeoutError:
        raise ServerError(f"no answer within {server.timeout_s:g} s") from None
    except ConnectionRefusedError:
        raise ServerError(f"nobody answers at {server.url}") from None
    except (OSError, httptools.HttpParserError) as error:
        raise ServerError(f"{type(error).__name__}: {error}") from None
    if answer.status != 200:
        refused = f"status {answer.status}: {_refusal(b''.join(answer.pieces))}"
        raise ServerError(refused if answer.status else "no answer")
    if not answer.is_complete:
        raise ServerError("the answer was cut off")


@asynccontextmanager
async def _connected(server: Server) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    parts = urlsplit(server.url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.close()


def _request(server: Server, method: str, path: str, body: object) -> bytes:
    parts = urlsplit(server.root)
    data = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {parts.path}{path} HTTP/1.1",
        f"host: {parts.netloc.rpartition('@')[2]}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *([f"authorization: Bearer {server.api_key}"] if server.api_key else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def _refusal(body: bytes) -> str:
    try:
        return _words(json.loads(body))
    except ValueError:
        return body[:MAX_ERROR_CHARS].decode(errors="replace")


def _words(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return str(message)[:MAX_ERROR_CHARS]
