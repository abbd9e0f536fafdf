"""Where clients open and close sessions, with a line for each model, and where requests of these are noted.

`Desk` is what the APIs and the pipelines know. `SessionDesk` is the one of a router that is one process; where there
are several, its parent has it, and each process has a link to it (`process.session_link`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from diptych.common.errors import DiptychError
from diptych.router.admission.session_door import ContextOfRequest, SessionDoor
from diptych.router.admission.session_line import Key
from diptych.router.values.kept_sessions import Follow, KeptSessions, Place, Terms, Tokens, Turn


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

    def turn(self, model: int, owner: str, follow: Follow, name: str) -> AbstractAsyncContextManager[Turn]:
        """Hold the place of a turn of a session while it runs. Raises the caller's `DiptychError`."""

    def usage(self) -> LineUsage | None:
        """Return what is counted here; None: another process counts it."""

    def leave(self) -> None:
        """Let nobody wait any more: the router leaves."""


@dataclass(frozen=True, slots=True)
class ModelDesk:
    """What a desk has for the requests of one model."""

    desk: Desk
    model: int

    def request(self, key: Key) -> AbstractContextManager[ContextOfRequest]:
        return self.desk.request(self.model, key)

    def turn(self, owner: str, follow: Follow, name: str) -> AbstractAsyncContextManager[Turn]:
        return self.desk.turn(self.model, owner, follow, name)


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

    @asynccontextmanager
    async def turn(self, model: int, owner: str, follow: Follow, name: str) -> AsyncGenerator[Turn, None]:
        before, place = self.begin(model, owner, follow, name)

        async def keep(prompt: Tokens, output: Tokens) -> None:
            place.keep(prompt, output)

        try:
            yield Turn(before, keep)
        finally:
            self.end(place)

    def begin(self, model: int, owner: str, follow: Follow, name: str) -> tuple[Tokens, Place]:
        """Return what a turn begins with, and where it is kept, until `end`. Raises `InvalidRequest`."""
        return self.sessions.begin(owner, follow, name, model, self._clock())

    def end(self, place: Place) -> None:
        """A turn runs no longer, kept or not."""
        place.end(self._clock())

    async def follow_pools(self, wait_for_change: Callable[[], Awaitable[None]]) -> None:
        """Let in whom there is room for whenever the pools may have changed, until cancelled."""
        while True:
            await wait_for_change()
            for door in self.doors:
                door.look()

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
