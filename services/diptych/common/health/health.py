"""Answers probes over HTTP from a thread and a port of its own, so that load on the others delays no answer.

`GET /health/live`, `/health/ready` and `/health/startup`: 200 or 503, and `{"status", "reason"}`. It needs no token:
it only reveals the state of this process, and accepts no data.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import http.client
import json
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from typing import Any, Final, Literal

from typing_extensions import TypedDict

from diptych.common.errors import ConfigError
from diptych.common.net.ports import binding
from diptych.common.net.reachable import bracketed
from diptych.common.verdicts.probes import Probe, Probes, Verdict

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 16  # beyond that the one that has been silent longest is closed
REQUEST_S: Final = 5.0  # that a client gets to ask, and again to take its answer
CLOSING_S: Final = 1.0  # that a closed one gets to let go of its place
STOP_POLL_S: Final = 0.1
MAX_HEAD_BYTES: Final = 32 * 2**10
MAX_REQUEST_LINE_BYTES: Final = 8 * 2**10
RETRY_S: Final = 0.1  # that a connection waits for a descriptor


class ProbeAnswer(TypedDict):
    """What a probe says."""

    status: Literal["ok", "failing"]
    reason: str


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to a GET."""

    status: int
    content_type: str
    body: bytes


Pages = Mapping[str, Callable[[], Page]]  # by path


def health_pages(probes: Probes) -> Pages:
    """Return the three paths that probes are served at."""
    return {f"/health/{name}": functools.partial(_ask, probe) for name, probe in probes.by_name().items()}


class HealthServer:
    """Serves probes, and further pages, inside `with`. Port 0: any free one. A `shared` one is kept by the parent."""

    def __init__(
        self, host: str, port: int, probes: Probes, pages: Pages | None = None, *, shared: bool = False
    ) -> None:
        self._server = _listen(host, port, {**health_pages(probes), **(pages or {})}, shared=shared)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="health", daemon=True
        )

    @property
    def port(self) -> int:
        """The port, also when the system chose it."""
        return int(self._server.server_address[1])

    def __enter__(self) -> HealthServer:
        self._thread.start()
        logger.info("health at port %d", self.port)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """A thread a connection, up to a limit: those that say nothing, or too slowly, hold up no other."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int], pages: Pages, *, shared: bool) -> None:
        self.address_family = family
        self.allow_reuse_port = shared
        self.pages = pages
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._asking: dict[socket.socket, float] = {}  # since when, the oldest first; those that have not asked yet
        self._lock = threading.Lock()
        self._spare: int | None = None
        super().__init__(address, _Handler)
        self._keep_spare()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept; where the process has no descriptor left, with the one that is kept for this, or after a pause."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if self._spare is None:
                time.sleep(RETRY_S)  # the listener stays readable: without a pause this would take a whole core
                raise
        self._free_spare()
        return super().get_request()

    def _keep_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def _free_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def server_close(self) -> None:
        super().server_close()
        self._free_spare()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._close_slow(1)
            if not self._free.acquire(timeout=CLOSING_S):  # all are being answered
                self.shutdown_request(request)
                return
        with self._lock:
            self._asking[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._let_go(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._let_go(request)

    def service_actions(self) -> None:
        since_s = time.monotonic() - REQUEST_S
        with self._lock:
            num_late = sum(began_s < since_s for began_s in self._asking.values())
        self._close_slow(num_late)
        self._keep_spare()

    def note_asked(self, request: socket.socket) -> None:
        with self._lock:
            self._asking.pop(request, None)

    def _let_go(self, request: socket.socket) -> None:
        self.note_asked(request)
        self._free.release()

    def _close_slow(self, count: int) -> None:
        """End the oldest connections on which nothing was asked yet: each one's thread sees the end of its stream."""
        with self._lock:
            for request in list(self._asking)[:count]:
                del self._asking[request]
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.exception("a health request failed")


class _Head:
    """What a client sends, as far as a head may go: the standard library bounds lines and their number only."""

    def __init__(self, sent: BufferedIOBase) -> None:
        self._sent = sent
        self._room = MAX_HEAD_BYTES

    def readline(self, size: int = MAX_HEAD_BYTES, /) -> bytes:
        if self._room <= 0:
            raise http.client.HTTPException(f"a head takes at most {MAX_HEAD_BYTES} bytes")  # becomes a 431
        line = self._sent.readline(min(size, self._room))
        self._room -= len(line)
        return line

    def close(self) -> None:
        self._sent.close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    raw_requestline: bytes
    error_content_type = "text/plain"
    error_message_format = "%(message)s: %(explain)s\n"

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def parse_request(self) -> bool:
        if len(self.raw_requestline) <= MAX_REQUEST_LINE_BYTES:
            return super().parse_request()
        self.requestline, self.request_version, self.command = "", "", ""  # as the standard library leaves them
        self.send_error(414, explain=f"a request's first line takes at most {MAX_REQUEST_LINE_BYTES} bytes")
        return False

    def do_GET(self) -> None:
        self.wfile.write(self._head().body)

    def do_HEAD(self) -> None:
        self._head()

    def _head(self) -> Page:
        """Say all but the body, and return it."""
        self.server.note_asked(self.connection)
        make = self.server.pages.get(self.path.partition("?")[0])
        page = make() if make else Page(404, "text/plain", "\n".join(["there is:", *self.server.pages, ""]).encode())
        self.send_response(page.status)
        self.send_header("content-type", page.content_type)
        self.send_header("content-length", str(len(page.body)))
        self.end_headers()
        return page

    def log_message(self, format: str, *args: object) -> None:
        """A probe a second would fill the log."""


def _listen(host: str, port: int, pages: Pages, *, shared: bool) -> _Server:
    family, bound = binding(host)
    try:
        return _Server(family, (bound, port), pages, shared=shared)
    except OSError as error:
        where = f"{bracketed(host)}:{port}"
        words = f"can't serve health on {where}: {error.strerror}; free the port or choose another --health-port"
        raise ConfigError(words) from None


def _ask(probe: Probe) -> Page:
    try:
        verdict = probe()
    except Exception as error:
        logger.exception("a probe failed")
        verdict = Verdict(False, f"internal error: {error}")
    body: ProbeAnswer = {"status": "ok" if verdict.is_good else "failing", "reason": verdict.reason}
    return Page(200 if verdict.is_good else 503, "application/json", json.dumps(body).encode())
