"""Events that wait for their reader, and a descriptor that is readable exactly while there are any."""

from __future__ import annotations

import os

from diptych.kvtransfer.transport import TransportEvent


class Inbox:
    """An unbounded list with an eventfd. One thread."""

    def __init__(self) -> None:
        self._events: list[TransportEvent] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def push(self, event: TransportEvent) -> None:
        if not self._events:
            os.eventfd_write(self._fd, 1)
        self._events.append(event)

    def drain(self) -> list[TransportEvent]:
        if self._events:
            os.eventfd_read(self._fd)
        events, self._events = self._events, []
        return events

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Forget everything; the descriptor is gone."""
        self._events.clear()
        os.close(self._fd)
