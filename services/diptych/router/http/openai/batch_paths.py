"""The paths of batches and files: served where there is a store, and without one they say what is missing."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import DiptychError
from diptych.router.http.exchange.answers import NotServed, refusal

NOT_THERE: Final = "this router keeps no batches: start it with --batch-store DIRECTORY, or the URL of a bucket"
PATHS: Final = (
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
)


def refuse_batches(app: FastAPI) -> None:
    """Add the paths, where nobody keeps batches."""
    for method, path in PATHS:
        app.add_route(path, _not_there, methods=[method])


async def _not_there(request: Request) -> Response:
    error: DiptychError = NotServed(404, NOT_THERE)
    return refusal(error, request)
