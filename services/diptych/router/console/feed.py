"""What viewers of a topic are sent: the document once, then what changes of it. Encoded once for all of them. Pure.

An event names its topic in its data, so one stream carries several. Infinite numbers are sent as null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from diptych.router.console.merge_patch import merge_patch
from diptych.router.console.state import Steps

Make = Callable[[], Mapping[str, Any]]  # a document, as it is now
StepsSince = Callable[[int], tuple[int, Steps]]  # a cursor in, the next one out; 0: all that are kept

PING: Final = b"event: ping\ndata: {}\n\n"


class Feed:
    """A topic whose document changes."""

    def __init__(self, topic: str, make: Make) -> None:
        self._topic = topic
        self._make = make
        self._document: Mapping[str, Any] = {}  # as viewers have it
        self._snapshot = b""  # of that; empty: not encoded

    def news(self) -> bytes:
        """Look at the document anew; return the event for who has the last one, empty if nothing has changed."""
        document = self._make()
        patch = merge_patch(self._document, document)
        if not patch:
            return b""
        encoded = event("patch", {"topic": self._topic, "patch": patch})
        self._document, self._snapshot = document, b""
        return encoded

    def snapshot(self) -> bytes:
        """Return the event for who has nothing: the document at the last look."""
        self._snapshot = self._snapshot or event("snapshot", {"topic": self._topic, "state": self._document})
        return self._snapshot


class StepsFeed:
    """Steps of workers, which are only ever added to."""

    def __init__(self, steps_since: StepsSince) -> None:
        self._steps_since = steps_since
        self._cursor = 0

    def news(self) -> bytes:
        """Return the event with the steps since the last look; empty if there are none."""
        self._cursor, steps = self._steps_since(self._cursor)
        return event("steps", steps) if steps["workers"] else b""

    def snapshot(self) -> bytes:
        """Return the event with all steps that are kept. Those since the last look are among them: look before."""
        return event("steps", self._steps_since(0)[1])


def event(kind: str, data: object) -> bytes:
    """Return one server-sent event. JSON has no line breaks of its own: what comes in names cannot end it."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))
