"""Rank 0's end of the log that the other ranks of its scheduler apply, and of what they say.

No call waits for a rank that died: whoever started the ranks ends all of them then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

import zmq

from diptych.v1 import rank_pb2


class RankLog:
    """Entries go to every rank in one order. `append` may be called from any thread, the rest from one."""

    def __init__(self, endpoint: str, size: int) -> None:
        """Listen for the ranks 1 to `size - 1`; `endpoint` is the scheduler's own."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._channels = [_bind(context, zmq.PAIR, rank_endpoint(endpoint, rank)) for rank in range(1, size)]
        self._events = _bind(context, zmq.PULL, events_endpoint(endpoint))
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """How many ranks there are, rank 0 included."""
        return len(self._channels) + 1

    def append(self, entry: rank_pb2.RankEntry) -> None:
        data = entry.SerializeToString()
        with self._lock:
            for channel in self._channels:
                channel.send(data)

    def ask(self, entry: rank_pb2.RankEntry) -> list[rank_pb2.RankAnswer]:
        """Append an entry that is answered; wait for each rank's answer, in order of rank."""
        self.append(entry)
        return self.answers()

    def answers(self) -> list[rank_pb2.RankAnswer]:
        """Wait for each rank's next answer."""
        return [rank_pb2.RankAnswer.FromString(channel.recv()) for channel in self._channels]

    def events(self) -> list[rank_pb2.RankEvent]:
        """Return what the ranks reported since the last call, without waiting."""
        events = []
        while True:
            try:
                events.append(rank_pb2.RankEvent.FromString(self._events.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return events

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable with news; `events` must then be called until it has none."""
        return (int(self._events.getsockopt(zmq.FD)),)

    def close(self) -> None:
        """End the log, for the ranks that are still there."""
        for channel in self._channels:
            with contextlib.suppress(zmq.Again):
                channel.send(rank_pb2.RankEntry(shutdown=True).SerializeToString(), zmq.NOBLOCK)
            channel.close(linger=1000)
        self._events.close(linger=0)


class NoRanks:
    """The log of a scheduler without other ranks."""

    size = 1

    def append(self, entry: rank_pb2.RankEntry) -> None:
        pass

    def ask(self, entry: rank_pb2.RankEntry) -> list[rank_pb2.RankAnswer]:
        return []

    def events(self) -> list[rank_pb2.RankEvent]:
        return []

    def descriptors(self) -> Sequence[int]:
        return ()


def rank_endpoint(endpoint: str, rank: int) -> str:
    return f"{endpoint}-{rank}"


def events_endpoint(endpoint: str) -> str:
    return f"{endpoint}-events"


def store_path(endpoint: str) -> Path:
    """Return the file through which the ranks meet."""
    return Path(endpoint.removeprefix("ipc://") + "-store")


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(0)
    socket.bind(endpoint)
    return socket
