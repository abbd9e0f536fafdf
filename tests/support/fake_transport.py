"""A client's connection to an HTTP server without a socket: what is fed to it, and what it answered."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from diptych.common.net.http_connection import HttpConnection, connections_of_a_server


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_reading_paused = False
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False


def server_config(app: Any) -> uvicorn.Config:
    """As `HttpServer` makes it, for connections that a test makes itself."""
    config = uvicorn.Config(app, interface="asgi3", access_log=False, timeout_keep_alive=75)
    config.loaded, config.loaded_app, config.ws_protocol_class = True, app, None
    return config


def connect(app: Any, kind: type[HttpConnection] | None = None) -> tuple[HttpConnection, FakeTransport]:
    """Return a new connection to a server of `app`, in a running event loop. `kind`: of the same server."""
    made, transport = (kind or connections_of_a_server(60, 16))(server_config(app), ServerState(), {}), FakeTransport()
    made.connection_made(transport)
    return made, transport


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with how long the body was."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
    words = str(num_bytes).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(words))]})
    await send({"type": "http.response.body", "body": words})
