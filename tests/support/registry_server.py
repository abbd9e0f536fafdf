"""An HTTP server that is as much of an OCI registry as `helm push` and `helm pull` need."""

from __future__ import annotations

import hashlib
import http.server
from urllib.parse import parse_qs, urlsplit


class RegistryServer(http.server.ThreadingHTTPServer):
    """Blobs and manifests by digest, and manifests by tag, of whatever repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stored: dict[str, tuple[bytes, str]] = {}  # content and its type
        self.host = f"127.0.0.1:{self.server_address[1]}"

    def store(self, names: tuple[str, ...], content: bytes, content_type: str) -> None:
        self.stored.update(dict.fromkeys(names, (content, content_type)))


class _Handler(http.server.BaseHTTPRequestHandler):
    server: RegistryServer

    def do_GET(self) -> None:
        found = self.server.stored.get(self._name)
        content, content_type = found or (b"{}", "application/json")
        self._answer(200 if found or self.path == "/v2/" else 404, content, {"content-type": content_type})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(202, b"", {"location": f"{urlsplit(self.path).path}one"})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        asked = parse_qs(urlsplit(self.path).query).get("digest", [digest])
        name = self._name if "/manifests/" in self.path else digest
        self.server.store((digest, name), content, self.headers.get("content-type", "application/octet-stream"))
        self._answer(201 if asked == [digest] else 400, b"", {"docker-content-digest": digest, "location": self.path})

    @property
    def _name(self) -> str:
        return urlsplit(self.path).path.rpartition("/")[2]

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status == 200:
            self.send_header("docker-content-digest", f"sha256:{hashlib.sha256(content).hexdigest()}")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass
