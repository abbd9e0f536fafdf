"""One server for downloads: files by HTTP with ranges and ETags, a hub's API over them, and a bucket's list.

`/PATH` is a file. `/api/models/ORG/NAME/revision/REV` lists the files below `/ORG/NAME/resolve/COMMIT/`, and
`/BUCKET?list-type=2` those of a bucket, as S3 does. What it does wrong is said by its fields.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT: Final = "c" * 40
MODEL: Final = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model-1.safetensors": random.Random(1).randbytes(3_000_000),
    "model-2.safetensors": random.Random(2).randbytes(2_000_001),
}


def sums(files: dict[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


class FilesServer(ThreadingHTTPServer):
    """Counts the bytes of files that it has sent, by path."""

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files: dict[str, bytes] = {}
        self.sent: dict[str, int] = {}
        self.asked: list[str] = []  # methods and paths
        self.cut_after: dict[str, int] = {}  # bytes, after which connections of a path end, as often as they can
        self.num_cuts = 0  # how often
        self.stalls_after: dict[str, int] = {}  # bytes, after which nothing comes, and at `goes_on` the end
        self.goes_on = threading.Event()
        self.damaged: dict[str, bytes] = {}  # what comes in place of a file's bytes
        self.statuses: dict[str, int] = {}  # of paths, or of a part of them
        self.token = ""  # that is asked for
        self.takes_ranges = True
        self.num_misplaced = 0  # answers to ranges that begin where the file does, and say so

    def admits(self, authorization: str) -> bool:
        return not self.token or authorization == f"Bearer {self.token}"

    def has_sent(self, path: str, begin: int, nbytes: int) -> None:
        """Count bytes of a file, from this place on. It may be called from several threads."""
        self.sent[path] = self.sent.get(path, 0) + nbytes

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may be killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FilesServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        status = next((code for part, code in self.server.statuses.items() if part in path), 0)
        if not self.server.admits(self.headers.get("authorization", "")):
            status = 401
        if status:
            return self._send(status, b"")
        if path.startswith("/api/models/"):
            return self._list_hub(path)
        if "list-type" in self.path:
            return self._list_bucket(path)
        if path not in self.server.files:
            return self._send(404, b"")
        return self._file(path, with_body=with_body)

    def _list_hub(self, path: str) -> None:
        name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
        below = f"/{name}/resolve/{COMMIT}/"
        files = {path.removeprefix(below): data for path, data in self.server.files.items() if path.startswith(below)}
        if not files:
            return self._send(404, b"", {"x-error-code": "RepoNotFound"})
        if revision not in ("main", "v1", COMMIT):
            return self._send(404, b"", {"x-error-code": "RevisionNotFound"})
        told = {"id": name, "sha": COMMIT, "siblings": [_sibling(*each) for each in files.items()]}
        return self._send(200, json.dumps(told).encode(), {"content-type": "application/json"})

    def _list_bucket(self, path: str) -> None:
        prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        keys = {key.removeprefix(f"{path}/"): data for key, data in self.server.files.items() if key.startswith(path)}
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><LastModified>2026-01-01T00:00:00.000Z"
            f"</LastModified><ETag>{_tag(data)}</ETag></Contents>"
            for key, data in sorted(keys.items())
            if key.startswith(prefix)
        )
        self._send(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())

    def _file(self, path: str, *, with_body: bool) -> None:
        data, tag = self.server.files[path], _tag(self.server.files[path])
        if self.headers.get("if-match", tag) != tag:
            return self._send(412, b"")
        first, _, last = self.headers.get("range", "").removeprefix("bytes=").partition("-")
        is_part = bool(first) and self.server.takes_ranges
        begin, end = (int(first), int(last or len(data) - 1) + 1) if is_part else (0, len(data))
        if is_part and self.server.num_misplaced:
            self.server.num_misplaced -= 1
            begin = 0
        headers = {"etag": tag, "content-length": str(end - begin), "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if is_part:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        body = self.server.damaged.get(path, data)[begin:end] if with_body else b""
        cut = self.server.cut_after.get(path)
        if with_body and cut is not None and cut < len(body) and self.server.num_cuts:
            self.server.num_cuts -= 1
            body, self.close_connection = body[:cut], True
        stall = self.server.stalls_after.pop(path, len(body)) if with_body else 0
        self._send(206 if is_part else 200, body[:stall], headers)
        if stall < len(body):
            self.server.goes_on.wait()
            self.close_connection = True
            return
        if with_body:
            self.server.has_sent(path, begin, len(body))

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _sibling(name: str, data: bytes) -> dict[str, object]:
    told: dict[str, object] = {"rfilename": name, "size": len(data)}
    told["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    if name.endswith((".safetensors", ".gguf")):
        told["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
    return told


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
