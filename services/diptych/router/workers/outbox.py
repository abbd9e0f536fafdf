"""Coalesces what is due to a worker: everything queued in one turn of the event loop leaves in one message.

Batches leave as bytes. In protobuf the bytes of two messages, one behind the other, are their merge: so the prompt of a
leg is serialised once for both legs, and copied nowhere but into the batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

import grpc

from diptych.v1.worker_pb2 import RouterBatch, StartLeg, ToolCalled, WorkerBatch

MAX_BATCH_BYTES: Final = 16 << 20  # of legs, beyond the first: far below the limit of a message
SESSION: Final = "/diptych.v1.Worker/Session"

_START_TAG: Final = bytes([RouterBatch.START_FIELD_NUMBER << 3 | 2])  # what a field of messages begins with


class Outbox:
    """An async iterator of batches, for one reader, up to `close`. Nothing is sent while nothing is due."""

    def __init__(self) -> None:
        self._starts: deque[tuple[bytes, bytes]] = deque()  # legs, and their prompts
        self._aborts: list[int] = []
        self._tools: list[ToolCalled] = []
        self._resync_kv = False
        self._router_id = 0
        self._due = asyncio.Event()
        self._is_closed = False

    def introduce(self, router_id: int) -> None:
        """Say who we are, before anything else."""
        self._router_id = router_id
        self._due.set()

    def start(self, leg: StartLeg, prompt: bytes = b"") -> None:
        """`prompt` is a `StartLeg` with the fields of the prompt, which `leg` lacks, serialised."""
        self._starts.append((leg.SerializeToString(), prompt))
        self._due.set()

    def abort(self, room: int) -> None:
        self._aborts.append(room)
        self._due.set()

    def tool_called(self, room: int, tool: str) -> None:
        self._tools.append(ToolCalled(room=room, tool=tool))
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

    async def __anext__(self) -> bytes:
        """Return the next `RouterBatch`."""
        await self._due.wait()
        if self._is_closed:
            raise StopAsyncIteration
        batch = RouterBatch(router_instance_id=self._router_id, resync_kv=self._resync_kv, tool_called=self._tools)
        self._router_id, self._resync_kv = 0, False
        self._tools.clear()
        legs = self._pop_legs()
        if not self._starts:  # an abort must not overtake its start
            batch.abort.extend(self._aborts)
            self._aborts.clear()
            self._due.clear()
        return b"".join((batch.SerializeToString(), *legs))

    def _pop_legs(self) -> list[bytes]:
        parts: list[bytes] = []
        num_bytes = 0
        while self._starts and (not parts or num_bytes + sum(map(len, self._starts[0])) <= MAX_BATCH_BYTES):
            leg, prompt = self._starts.popleft()
            num_bytes += len(leg) + len(prompt)
            parts += (_START_TAG, _varint(len(leg) + len(prompt)), leg, prompt)
        return parts


def open_session(channel: grpc.aio.Channel, outbox: Outbox, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    """Begin a session that sends what is due in `outbox`; return the call, an async iterator of `WorkerBatch`."""
    session = channel.stream_stream(SESSION, None, WorkerBatch.FromString)
    return session(outbox, metadata=metadata)


def _varint(number: int) -> bytes:
    """As protobuf writes a length."""
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])
