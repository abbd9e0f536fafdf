"""Events on their way from whoever does the work to the user of a transport, and a descriptor for them."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from threading import Lock

from diptych.kvtransfer.transport import TransportEvent

OnDrained = Callable[[], None]


class EventQueue:
    """The descriptor is readable exactly while there are events."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._events: deque[tuple[TransportEvent, OnDrained | None]] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)  # also of a queue that nobody closes

    def push(self, event: TransportEvent, on_drained: OnDrained | None = None) -> None:
        """`on_drained` is called when the event is drained, on the thread that drains."""
        with self._lock:
            if not self._events:
                os.eventfd_write(self._descriptor, 1)
            self._events.append((event, on_drained))

    def drain(self) -> list[TransportEvent]:
        if not self._events:
            return []
        with self._lock:
            os.eventfd_read(self._descriptor)
            drained, self._events = self._events, deque()
        for _, on_drained in drained:
            if on_drained is not None:
                on_drained()
        return [event for event, _ in drained]

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        self._close()
