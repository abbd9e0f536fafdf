"""The clock of schedulers that share experts: where a scheduler waits, before a step, until all others step too.

Messages go between the schedulers of a worker, over Unix sockets in a private folder. No call waits for a scheduler
that died: whoever started them ends all of them then. One that was told to stop says so, and whoever waits for it gets
`Unavailable`.
"""

from __future__ import annotations

import struct
from typing import Final

import zmq

from diptych.common.errors import Unavailable
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.values.rounds import NOTHING, Part, Round, Rounds

_MESSAGE: Final = struct.Struct("<BHQII?II")
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_SPEAKS: Final = 0
_LEAVES: Final = 1
MEET_MS: Final = 300_000  # the last resort, as of collectives
LAST_WORDS_MS: Final = 200


class StepClock:
    """One scheduler's place at the clock. One thread uses it."""

    def __init__(self, place: SharedExperts) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._own = place.scheduler
        self._rounds = Rounds(place.scheduler, place.num_schedulers)
        self._ears: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._ears.set_hwm(0)
        self._ears.bind(_address(place.folder, place.scheduler))
        self._others = [_mouth(context, place, other) for other in range(place.num_schedulers) if other != self._own]
        self._left: set[int] = set()

    def descriptor(self) -> int:
        """Return what becomes readable when somebody speaks; `is_called` must be asked before it is waited for."""
        return int(self._ears.getsockopt(zmq.FD))

    def is_called(self) -> bool:
        """Return whether somebody has a step and waits for us."""
        self._listen()
        return self._rounds.is_called

    def meet(self, own: Part) -> Round:
        """Say what our part of the next round is; wait for all others. Raises `Unavailable` if one has left."""
        self._say(_SPEAKS, own)
        while (found := self._rounds.close(own)) is None:
            if self._left:
                raise Unavailable(f"scheduler {min(self._left)}, which shares our experts, has ended")
            if not self._ears.poll(MEET_MS):
                raise Unavailable("a scheduler that shares our experts did not step in time")
            self._listen()
        return found

    def close(self) -> None:
        """Leave: between two rounds."""
        self._say(_LEAVES, NOTHING)
        for socket in self._others:
            socket.close(linger=LAST_WORDS_MS)
        self._ears.close(linger=0)

    def _say(self, what: int, part: Part) -> None:
        sizes = part.num_tokens, part.num_picked, part.is_plain, part.late_tokens, part.late_picked
        message = _MESSAGE.pack(what, self._own, self._rounds.number, *sizes)
        for socket in self._others:
            socket.send(message, zmq.NOBLOCK)  # never full: at most two rounds are on their way

    def _listen(self) -> None:
        while int(self._ears.get(_EVENTS)) & _POLLIN:
            what, scheduler, number, *part = _MESSAGE.unpack(self._ears.recv(zmq.NOBLOCK))
            if what == _LEAVES:
                self._left.add(scheduler)
            else:
                self._rounds.hear(scheduler, number, Part(*part))


def _mouth(context: zmq.Context[zmq.Socket[bytes]], place: SharedExperts, other: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(_address(place.folder, other))
    return socket


def _address(folder: str, scheduler: int) -> str:
    return f"ipc://{folder}/clock-{scheduler}"
