"""Runs an HTTP application on uvicorn. The caller handles signals and decides when to stop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from typing import Any, Final

import uvicorn

from diptych.common.errors import ConfigError
from diptych.common.net.descriptors import connections_within
from diptych.common.net.http_connection import MAX_UNSENT_BYTES, connections_of_a_server
from diptych.common.net.ports import binding
from diptych.common.net.reachable import bracketed

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75  # longer than common proxies keep a connection
STALL_S: Final = 60.0
MAX_CONNECTIONS: Final = 256  # clients here only scrape and administer


class HttpServer:
    """An application on a port. `run` until `stop`."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        stop_grace_s: int,
        stall_s: float = STALL_S,
        max_connections: int = MAX_CONNECTIONS,
        own_port: int | None = None,
    ) -> None:
        """A client that takes nothing for `stall_s` is cut off, and one whose request's head takes longer.

        It keeps `max_connections`, or as many as the process's descriptors allow.

        With `own_port` other processes may listen at `port` too; this one alone is reached at `own_port`.
        """
        self._sockets = [_listen(host, port, shared=own_port is not None)]
        if own_port is not None:
            self._sockets.append(_listen(host, own_port, shared=True))  # with the parent, which keeps it
        config = uvicorn.Config(
            app,
            access_log=False,
            backlog=BACKLOG,
            http=connections_of_a_server(stall_s, connections_within(max_connections)),
            lifespan="off",
            log_config=None,
            proxy_headers=False,  # nobody asks where a client is
            log_level="warning",  # that it starts and stops we say ourselves
            server_header=False,
            timeout_graceful_shutdown=stop_grace_s,
            timeout_keep_alive=KEEP_ALIVE_S,
            ws="none",
        )
        self._server = _Server(config)

    @property
    def port(self) -> int:
        """The port, also when the system chose it."""
        return int(self._sockets[0].getsockname()[1])

    @property
    def own_port(self) -> int:
        """The port at which nobody but this process listens."""
        return int(self._sockets[-1].getsockname()[1])

    async def run(self) -> None:
        """Serve until `stop`, and then until running requests ended or the grace is over."""
        await self._server.serve(sockets=self._sockets)

    def leave_shared_port(self) -> None:
        """Take new connections at `own_port` only; those that there are stay."""
        self._server.servers[0].close()
        self._sockets[0].close()

    def stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


def _listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    family, bound = binding(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)  # inherited by its connections
    try:
        listener.bind((bound, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        words = f"can't listen on {bracketed(host)}:{port}: {error.strerror}; free the port or choose another"
        raise ConfigError(words) from None
    return listener
