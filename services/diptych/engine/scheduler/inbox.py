"""What the frontend has said, in its order. It may be looked into while a step runs, which takes nothing out."""

from __future__ import annotations

from collections import deque
from collections.abc import Set

import zmq

from diptych.v1 import engine_pb2


class Inbox:
    """Reads a command channel without waiting. One thread uses it."""

    def __init__(self, channel: zmq.Socket[bytes]) -> None:
        self._channel = channel
        self._commands: deque[engine_pb2.SchedulerCommands] = deque()

    def take(self) -> engine_pb2.SchedulerCommands | None:
        """Return what was said next; None when that is all."""
        self._read()
        return self._commands.popleft() if self._commands else None

    def aborted(self) -> Set[int]:
        """Return the rooms of which an abort waits to be taken."""
        self._read()
        return {room for commands in self._commands for room in commands.abort}

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._commands.append(engine_pb2.SchedulerCommands.FromString(message))
