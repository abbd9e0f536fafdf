"""An HTTP server that answers as the Kubernetes API does, as far as it is asked here."""

from __future__ import annotations

import http.server
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Server(http.server.ThreadingHTTPServer):
    """Lists three pods in two pages, or `objects`; takes patches by whoever has the token of now."""

    token = "first"
    promised = 0  # bytes of an answer, that do not come

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.patched: list[tuple[str, str, Any]] = []
        self.annotations: dict[str, dict[str, str]] = {}  # of pods
        self.objects: dict[str, list[Any]] = {}  # by path; other paths are not found then
        self.conflicts: set[str] = set()  # paths whose objects somebody else has just changed


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        self.server.asked.append((url.path, query))
        if self.server.objects:
            found = self.server.objects.get(url.path)
            words = {"message": "the server could not find the requested resource"}
            self._answer(404, words) if found is None else self._answer(200, {"metadata": {}, "items": found})
            return
        names, more = (["c"], "") if "continue" in query else (["a", "b"], "page 2")
        pods = [{"metadata": {"name": name, "annotations": self.server.annotations.get(name)}} for name in names]
        self._answer(200, {"metadata": {"continue": more}, "items": pods})

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in self.server.conflicts:
            self._answer(409, {"message": "the object has been modified"})
            return
        self.server.patched.append((self.path, self.headers["Content-Type"], body))
        self._answer(200, {})

    def _answer(self, status: int, body: Any) -> None:
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            status, body = 403, {"message": 'pods is forbidden: User "x" cannot list resource "pods"'}
        self.send_response(status)
        if self.server.promised:
            self.send_header("Content-Length", str(self.server.promised))
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass
