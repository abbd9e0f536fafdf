"""What a path needs is imported at its first use, and never on the loop, where tokens stream meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from diptych.common.refusals import Refusals
from diptych.common.trust.trust import INSECURE
from diptych.engine.frontend.weights.weight_routes import VERSION, weight_routes

LATE = "diptych.engine.frontend.weights.weight_requests"


class LateModule(ModuleType):
    """Notes which thread imports from it."""

    thread = 0

    def __getattr__(self, name: str) -> Any:
        if name != "WeightRequests":
            raise AttributeError(name)
        self.thread = threading.get_ident()
        return lambda groups, drain_s: self

    def handlers(self) -> Any:
        return {VERSION: self.answer}

    async def answer(self, request: Request) -> tuple[int, dict[str, str]]:
        return 200, {"a": "7"}


def test_what_changes_weights_is_imported_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateModule(LATE)
    monkeypatch.setitem(sys.modules, LATE, late)
    app = Starlette(routes=weight_routes(tuple, 0.0, INSECURE, Refusals()))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker") as client:
            return await client.get(VERSION)

    response = asyncio.run(ask())
    assert (response.status_code, response.json()) == (200, {"a": "7"})
    assert late.thread not in (0, threading.get_ident())
