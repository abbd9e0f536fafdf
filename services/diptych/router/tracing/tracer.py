"""Follows calls from their first byte to their last word, and hands them on to be exported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from diptych.router.tracing.record import CallTrace, Edge, parent_of

LINGER_S: Final = 1.0  # after a call's end, for the last words of its prefill legs


class Export(Protocol):
    """Where traces go. Neither blocks nor fails, whatever becomes of them."""

    def add(self, call: CallTrace) -> None: ...

    async def close(self) -> None:
        """Send what is left, if it can be done soon."""
        ...


class Tracer:
    """Follows calls, and exports what was noted of them."""

    def __init__(self, export: Export) -> None:
        self._export = export
        self._ended: dict[CallTrace, asyncio.TimerHandle] = {}  # and not exported yet

    @contextmanager
    def follow(self, edge: Edge, fields: Mapping[str, str]) -> Generator[CallTrace, None, None]:
        """Follow a call that has come in, with these headers or metadata, until it is answered or given up."""
        call = CallTrace(edge, time.monotonic(), time.time_ns(), parent_of(fields))
        try:
            yield call
        finally:
            call.ended_s = time.monotonic()
            self._ended[call] = asyncio.get_running_loop().call_later(LINGER_S, self._finish, call)

    def _finish(self, call: CallTrace) -> None:
        self._ended.pop(call).cancel()
        self._export.add(call)

    async def close(self) -> None:
        """Export what has ended. No call is running any more."""
        for call in list(self._ended):
            self._finish(call)
        await self._export.close()
