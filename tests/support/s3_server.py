"""A server that speaks as much of S3 as a store of objects needs: GET with ranges, HEAD, PUT, DELETE, over a socket."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    refuses: threading.Event  # everything

    def do_HEAD(self) -> None:
        self._give(with_body=False)

    def do_GET(self) -> None:
        self._give(with_body=True)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        is_taken = False
        if not self.refuses.is_set() and self.headers.get("If-None-Match") == "*":
            is_taken = self.objects.setdefault(self.path, data) is not data
        elif not self.refuses.is_set():
            self.objects[self.path] = data
        self._answer(503 if self.refuses.is_set() else 412 if is_taken else 200, b"")

    def do_POST(self) -> None:
        """Delete objects: what is not there counts as deleted."""
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", asked)
        for key in keys:
            self.objects.pop(f"{self.path.partition('?')[0]}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _give(self, *, with_body: bool) -> None:
        data = self.objects.get(self.path)
        if data is None or self.refuses.is_set():
            self._answer(503 if self.refuses.is_set() else 404, b"")
            return
        first, last = self._range(len(data))
        if first >= len(data):
            self._answer(416, b"")
            return
        part = data[first : last + 1]
        self._answer(206 if "Range" in self.headers else 200, part, with_body=with_body, where=(first, last, len(data)))

    def _range(self, nbytes: int) -> tuple[int, int]:
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        return int(asked[0]), min(nbytes - 1, int(asked[1] or nbytes))

    def _answer(
        self, status: int, body: bytes, *, with_body: bool = True, where: tuple[int, int, int] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        if status == 206 and where is not None:
            self.send_header("Content-Range", "bytes {}-{}/{}".format(*where))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[str, dict[str, bytes], threading.Event]]:
    """Yield the endpoint, the objects by path, and what makes the server refuse everything."""
    objects: dict[str, bytes] = {}
    refuses = threading.Event()
    handler = type("Handler", (_Handler,), {"objects": objects, "refuses": refuses})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", objects, refuses
        server.shutdown()
        thread.join()
