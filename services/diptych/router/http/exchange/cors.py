"""Lets pages in browsers be clients: those of the origins that the operator names. Preflights carry no key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from diptych.common.errors import ConfigError

ANY: Final = "*"
METHODS: Final = ("GET", "HEAD", "POST", "DELETE")
SHOWN: Final = ("retry-after", "x-request-id", "request-id")  # that a script may read, beside what it always may


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the application for pages of these origins; without one it is as it was.

    Keys are sent in a header that a script sets, so no credentials of the browser's are asked for.
    """
    if not origins:
        return app
    return CORSMiddleware(app, origins, METHODS, allow_headers=(ANY,), expose_headers=SHOWN)


def check_origins(origins: Sequence[str]) -> None:
    """Raise `ConfigError` for what no browser would send as its page's origin."""
    for origin in origins:
        parts = urlsplit(origin)
        if origin != ANY and (not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
            raise ConfigError(f"--cors-origins takes '{ANY}' or origins as https://chat.example:8443, not {origin!r}")
