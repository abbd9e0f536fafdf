"""Coalesces what is due to a worker: everything queued in one turn of the event loop leaves in one message."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from diptych.v1.worker_pb2 import RouterBatch, StartLeg

MAX_BATCH_TOKENS: Final = 4 << 20  # of prompts; at most 5 bytes each: far below the limit of a message


class Outbox:
    """An async iterator of batches, for one reader, up to `close`. Nothing is sent while nothing is due."""

    def __init__(self) -> None:
        self._starts: deque[StartLeg] = deque()
        self._aborts: list[int] = []
        self._resync_kv = False
        self._due = asyncio.Event()
        self._is_closed = False

    def start(self, leg: StartLeg) -> None:
        self._starts.append(leg)
        self._due.set()

    def abort(self, room: int) -> None:
        self._aborts.append(room)
        self._due.set()

    def resync_kv(self) -> None:
        self._resync_kv = True
        self._due.set()

    def close(self) -> None:
        """Let the reader end: gRPC stops reading requests of a finished call only when they end by themselves."""
        self._is_closed = True
        self._due.set()

    def __aiter__(self) -> Outbox:
        return self

    async def __anext__(self) -> RouterBatch:
        await self._due.wait()
        if self._is_closed:
            raise StopAsyncIteration
        batch, num_tokens = RouterBatch(resync_kv=self._resync_kv), 0
        self._resync_kv = False
        while self._starts and num_tokens <= MAX_BATCH_TOKENS - len(self._starts[0].prompt_token_ids):
            num_tokens += len(self._starts[0].prompt_token_ids)
            batch.start.append(self._starts.popleft())
        if not self._starts:  # an abort must not overtake its start
            batch.abort.extend(self._aborts)
            self._aborts.clear()
            self._due.clear()
        return batch
