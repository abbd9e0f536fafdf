"""Notices that a connection to rank 0 has broken, whatever its rank is busy with or waits for."""

from __future__ import annotations

import contextlib
import struct
import threading
import uuid
from collections.abc import Callable
from typing import Final

import zmq

_EVENT: Final = struct.Struct("=Hi")  # its number, and a value; PyZMQ's reader of it imports asyncio
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
GRACE_S: Final = 1.0  # rank 0 closes its channels behind the last entry, which is applied within this time


class ConnectionWatch:
    """Watches sockets that connect once. A thread for each waits in C, and ends with its socket."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called with words, by a thread of ours."""
        self._on_lost = on_lost
        self._is_over = threading.Event()
        # of which the threads close what they use, and nobody else
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(zmq.Context.instance())

    def add(self, socket: zmq.Socket[bytes], address: str) -> threading.Event:
        """Watch a socket that is about to connect there; return what is set once it has."""
        is_connected = threading.Event()
        where = f"inproc://{uuid.uuid4()}"
        socket.monitor(where, _EVENTS)
        events = self._context.socket(zmq.PAIR)
        events.connect(where)
        arguments = (events, address, is_connected)
        threading.Thread(target=self._watch, args=arguments, name="connection", daemon=True).start()
        return is_connected

    def end(self) -> None:
        """What breaks from now on, or broke just now, is no loss."""
        self._is_over.set()

    def _watch(self, events: zmq.Socket[bytes], address: str, is_connected: threading.Event) -> None:
        """Until the last event: ZeroMQ would wait for ever to be rid of one that nobody reads."""
        with contextlib.suppress(zmq.ContextTerminated), contextlib.closing(events):
            while (event := _EVENT.unpack(events.recv_multipart()[0])[0]) != zmq.EVENT_MONITOR_STOPPED:
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    is_connected.set()
                elif not self._is_over.wait(GRACE_S):
                    self._on_lost(f"the connection to rank 0 at {address} has broken: what was on its way is lost")
