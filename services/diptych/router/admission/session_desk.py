"""Where clients open and close sessions, with a line for each model, and where requests of these are noted.

`Desk` is what the APIs and the pipelines know. `SessionDesk` is the one of a router that is one process; where there
are several, its parent has it, and each process has a link to it (`process.session_link`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from diptych.common.errors import DiptychError
from diptych.router.admission.session_door import ContextOfRequest, SessionDoor
from diptych.router.admission.session_line import Key
from diptych.router.values.kept_sessions import Follow, KeptSessions, Terms, Turn


@dataclass(frozen=True, slots=True)
class LineUsage:
    """What became of sessions in line, of all models."""

    num_waiting: int
    num_in: int
    num_tokens: int  # of context that those who are in count with
    capacity_tokens: int  # that these may have
    num_admitted: int
    num_given_up: int
    num_expired: int
    waited_s: float


class Desk(Protocol):
    """Sessions of clients, each of one of the router's models, which are numbered."""

    async def open(self, key: Key, terms: Terms, wait_s: float) -> None:
        """Open a session, once there is room if `wait_s` is not 0. Raises the caller's `DiptychError`.

        Cancel it when the client leaves: the place in line is kept for a while.
        """

    async def close(self, key: Key) -> bool:
        """Return whether the session was open, or waited."""

    def request(self, model: int, key: Key) -> AbstractContextManager[ContextOfRequest]:
        """Hold a session while a request of it runs. It does not wait for anything."""

    def turn(self, owner: str, follow: Follow, name: str, now_s: float) -> Turn:
        """Return a turn of a session. Raises `InvalidRequest`, and `Conflict` where no turns are kept."""

    def usage(self) -> LineUsage | None:
        """Return what is counted here; None: another process counts it."""

    def leave(self) -> None:
        """Let nobody wait any more: the router leaves."""


class SessionDesk:
    """The desk of a whole router. It is the event loop's alone."""

    def __init__(self, doors: Sequence[SessionDoor], clock: Callable[[], float]) -> None:
        """`doors`: one a model."""
        self.doors = doors
        self.sessions = KeptSessions()
        self._clock = clock

    async def open(self, key: Key, terms: Terms, wait_s: float) -> None:
        door = self.doors[terms.model]
        self.sessions.check(*key, terms, self._clock())
        if wait_s:
            await door.wait(key, terms.expected_tokens, wait_s)
        try:
            self.sessions.open(*key, terms, self._clock())
        except DiptychError:
            door.release(key)
            raise
        door.claim(key, terms.idle_s)

    async def close(self, key: Key) -> bool:
        was_open = self.sessions.close(*key)
        return any([was_open, *(door.close(key) for door in self.doors)])

    def request(self, model: int, key: Key) -> AbstractContextManager[ContextOfRequest]:
        return self.doors[model].request(key)

    def turn(self, owner: str, follow: Follow, name: str, now_s: float) -> Turn:
        return self.sessions.turn(owner, follow, name, now_s)

    def usage(self) -> LineUsage:
        for door in self.doors:
            door.expire()
        doors, lines = self.doors, [door.line for door in self.doors]
        return LineUsage(
            sum(line.num_waiting for line in lines),
            sum(line.num_in for line in lines),
            sum(line.num_tokens for line in lines),
            sum(door.capacity_tokens for door in doors),
            sum(door.num_admitted for door in doors),
            sum(door.num_given_up for door in doors),
            sum(line.num_expired for line in lines),
            sum(door.waited_s for door in doors),
        )

    def leave(self) -> None:
        for door in self.doors:
            door.leave()
