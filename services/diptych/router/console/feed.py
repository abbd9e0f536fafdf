"""What viewers of a topic are sent: the document once, then what changes of it. Encoded once for all of them. Pure.

An event names its topic in its data, so one stream carries several. Infinite numbers are sent as null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import orjson

from diptych.router.console.pieces import Pieces, encoded, merge_patch_of
from diptych.router.console.state import Steps

Make = Callable[[], Pieces[Mapping[str, Any]]]  # a document, as it is now

KEPT_PARTS: Final = 32
PING: Final = b"event: ping\ndata: {}\n\n"


class StepLog(Protocol):
    """The steps that are kept."""

    @property
    def steps_end(self) -> int:
        """The cursor of who has all of them."""
        ...

    def steps_since(self, cursor: int) -> tuple[int, Steps]:
        """Return the next cursor, and steps from one on: some at a time; none: the cursor stays."""
        ...


class Feed:
    """A topic whose document changes."""

    def __init__(self, topic: str, make: Make) -> None:
        self._topic = topic
        self._make = make
        self._document: Mapping[str, Any] = {}  # as viewers have it
        self._snapshot = b""  # of that; empty: not encoded

    def news(self) -> Pieces[bytes]:
        """Look at the document anew; return the event for who has the last one, empty if nothing has changed."""
        document = yield from self._make()
        patch = yield from merge_patch_of(self._document, document)
        if not patch:
            return b""
        told = yield from self._event("patch", "patch", patch)
        self._document, self._snapshot = document, b""
        return told

    def snapshot(self) -> Pieces[bytes]:
        """Return the event for who has nothing: the document at the last look. No look may be under way."""
        if not self._snapshot:
            self._snapshot = yield from self._event("snapshot", "state", self._document)
        return self._snapshot

    def _event(self, kind: str, member: str, document: Mapping[str, Any]) -> Pieces[bytes]:
        told = yield from encoded(document)
        yield
        return event(kind, {"topic": self._topic, member: orjson.Fragment(told)})


class StepsFeed:
    """Steps of workers, which are only ever added to. Each viewer reads on from where it is, as fast as it takes them.

    Viewers that have the same read the same: the last parts are kept as they were encoded. Who comes is told what is
    new from then on, and may ask for the rest.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._parts: dict[int, tuple[int, bytes]] = {}  # by cursor: the next one, and the event

    @property
    def end(self) -> int:
        """The cursor of who has all steps."""
        return self._log.steps_end

    def has(self, cursor: int) -> bool:
        """Return whether the part from there on takes no time: it is made."""
        return cursor in self._parts

    def part(self, cursor: int) -> tuple[int, bytes]:
        """Return the next cursor, and the event for who has all steps before a cursor; empty: there are no more yet."""
        if cursor in self._parts:
            return self._parts[cursor]
        end, steps = self._log.steps_since(cursor)
        if not steps["workers"]:
            return end, b""
        if len(self._parts) >= KEPT_PARTS:
            del self._parts[next(iter(self._parts))]
        self._parts[cursor] = end, event("steps", steps)
        return self._parts[cursor]


class StepsReader:
    """How far one viewer is."""

    def __init__(self, feed: StepsFeed) -> None:
        self._feed = feed
        self._cursor = feed.end

    def __call__(self) -> bytes:
        """Return the next events, of which one at most has to be made; empty: no more yet."""
        self._cursor, text = self._feed.part(self._cursor)
        while text and self._feed.has(self._cursor):
            self._cursor, part = self._feed.part(self._cursor)
            text += part
        return text


def event(kind: str, data: object) -> bytes:
    """Return one server-sent event. JSON has no line breaks of its own: what comes in names cannot end it."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))
