"""The files of the console's page: read and compressed once, and answered from memory.

A path is looked up among the files that there were at the start, so none can lead out of their folder.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"
TYPES: Final[Mapping[str, str]] = {  # of files that are served
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, in both forms."""

    content_type: str
    body: bytes
    compressed: bytes  # by gzip
    etag: str  # weak: the same for both forms


def read_files(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """Return all files below a folder by their paths in it; the index is also the empty path. Raises `OSError`."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in TYPES and path.is_file()]
    files = {path.relative_to(folder).as_posix(): _page_file(path) for path in paths}
    return {**files, "": files[INDEX]} if INDEX in files else files


def _page_file(path: Path) -> PageFile:
    body = path.read_bytes()
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
    return PageFile(TYPES[path.suffix], body, gzip.compress(body, mtime=0), etag)


def file_answer(file: PageFile, request: Request) -> Response:
    """Return a file in the form that the browser takes; a copy that it has is looked at again each time."""
    headers = {"etag": file.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if file.etag in _listed(request.headers, "if-none-match"):
        return Response(status_code=304, headers=headers)
    if _takes_gzip(request.headers):
        return Response(
            file.compressed, headers={**headers, "content-encoding": "gzip", "content-type": file.content_type}
        )
    return Response(file.body, headers={**headers, "content-type": file.content_type})


def _takes_gzip(headers: Headers) -> bool:
    named = (entry.partition(";") for entry in _listed(headers, "accept-encoding"))
    return any(name.strip() == "gzip" and weight.replace(" ", "") not in _NEVER for name, _, weight in named)


_NEVER: Final = ("q=0", "q=0.0", "q=0.00", "q=0.000")


def _listed(headers: Headers, name: str) -> list[str]:
    return [entry.strip() for entry in headers.get(name, "").split(",")]
