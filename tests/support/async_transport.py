"""The asyncio face of a transport: awaitable operations, events as an async iterator. No polling."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.flow import NO_FLOW, Flow
from diptych.kvtransfer.transport import InstanceId, OpDone, PageWrite, Transport, TransportEvent


class TransferTimeout(TransferError):
    """An operation is not complete in time; it may still complete."""


class AsyncTransport:
    """Wraps a transport for one event loop. Use as a context manager; the transport stays the caller's to close."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._ops: dict[int, asyncio.Future[None]] = {}
        self._events: deque[TransportEvent] = deque()
        self._arrived = asyncio.Event()

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self.transport.fileno(), self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self.transport.fileno())
        for waiter in self._ops.values():
            waiter.cancel()

    async def write_pages(
        self, peer: InstanceId, write: PageWrite, note: bytes = b"", flow: Flow = NO_FLOW, *, timeout_s: float
    ) -> None:
        """Return when every page is remotely complete and the note is sent. Raises `TransferError`.

        After `TransferTimeout` the pages are still in use: until the operation's `OpDone` comes as an event.
        """
        await self._finish(self.transport.write_pages(peer, write, note, flow), timeout_s)

    async def send_note(self, peer: InstanceId, note: bytes, *, timeout_s: float) -> None:
        await self._finish(self.transport.send_note(peer, note), timeout_s)

    async def events(self) -> AsyncIterator[TransportEvent]:
        """Yield links, notes, and the ends of operations that nobody awaits any more, as they come, for ever."""
        while True:
            while self._events:
                yield self._events.popleft()
            self._arrived.clear()
            await self._arrived.wait()

    async def _finish(self, op: int, timeout_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ops[op] = waiter
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            raise TransferTimeout(f"no completion within {timeout_s} s") from None
        finally:
            del self._ops[op]

    def _read(self) -> None:
        for event in self.transport.poll():
            self._on_event(event)

    def _on_event(self, event: TransportEvent) -> None:
        waiter = self._ops.get(event.op) if isinstance(event, OpDone) else None
        if not isinstance(event, OpDone) or waiter is None or waiter.done():
            self._events.append(event)
            self._arrived.set()
        elif event.error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(TransferError(event.error))
