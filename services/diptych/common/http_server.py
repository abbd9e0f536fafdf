"""Runs an HTTP application on uvicorn. Signals and the moment to stop are the caller's."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from typing import Any, Final

import uvicorn

from diptych.common.errors import ConfigError

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75  # longer than common proxies keep a connection


class HttpServer:
    """An application on a port. `run` until `stop`."""

    def __init__(self, app: Any, host: str, port: int, *, stop_grace_s: int) -> None:
        self._socket = _listen(host, port)
        config = uvicorn.Config(
            app,
            access_log=False,
            backlog=BACKLOG,
            lifespan="off",
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=stop_grace_s,
            timeout_keep_alive=KEEP_ALIVE_S,
            ws="none",
        )
        self._server = _Server(config)

    @property
    def port(self) -> int:
        """The port, also when the system chose it."""
        return int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serve until `stop`, and then until running requests ended or the grace is over."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}; free the port or choose another") from None
    return listener
