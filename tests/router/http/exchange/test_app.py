"""What few ask of a router is imported at its first use, and never on the loop, where tokens stream meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from diptych.router.http.exchange.app import _add_vectors, _openapi

OPENAPI, VECTORS = "diptych.router.http.operate.openapi", "diptych.router.http.vectors.routes"


class LateModule(ModuleType):
    """Notes which thread imports from it."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        self.names = names
        self.thread = 0

    def __getattr__(self, name: str) -> Any:
        if name not in self.names:
            raise AttributeError(name)
        self.thread = threading.get_ident()
        return self.names[name]


def ask(call: Callable[[Request], Coroutine[Any, Any, Response]]) -> bytes:
    return bytes(asyncio.run(call(Request({"type": "http"}))).body)


def test_the_document_is_made_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateModule(OPENAPI, openapi_json=lambda: b"{}")
    monkeypatch.setitem(sys.modules, OPENAPI, late)
    assert ask(_openapi) == b"{}"
    assert late.thread not in (0, threading.get_ident())


@pytest.mark.parametrize("pooling", [None, "embed"])
def test_what_answers_with_vectors_is_imported_beside_the_loop_or_at_start(
    pooling: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer_vectors(path: str, request: Request, models: Any, bodies: Any) -> Response:
        return Response(path)

    late = LateModule(VECTORS, answer_vectors=answer_vectors)
    monkeypatch.setitem(sys.modules, VECTORS, late)
    app, models = FastAPI(), [SimpleNamespace(model=SimpleNamespace(pooling=pooling))]
    given: Any = models
    _add_vectors(app, given, given)
    at_start, late.thread = late.thread, 0
    route: Any = next(each for each in app.routes if getattr(each, "path", "") == "/v1/embeddings")
    assert ask(route.endpoint) == b"/v1/embeddings"
    if pooling:
        assert (at_start, late.thread) == (threading.get_ident(), 0)
    else:
        assert at_start == 0
        assert late.thread not in (0, threading.get_ident())
