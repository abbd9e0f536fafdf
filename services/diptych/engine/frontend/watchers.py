"""Who watches an instance, and what is due to each: many watchers cost its scheduler as much as one.

A watcher takes all that is due to it in one message, so a slow one gets fewer and larger ones. What it has not taken is
bounded: the oldest steps are dropped, and it is told how many.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from diptych.common.errors import Overloaded
from diptych.v1.worker_pb2 import StepMark, StepRecords, WorkerNews, WorkerStatus

LEASE_S: Final = 10.0  # that the scheduler is asked for
RENEW_S: Final = LEASE_S / 3
MAX_WATCHERS: Final = 64
MAX_STEPS: Final = 8192  # that wait for one watcher


class _Told(NamedTuple):
    """Steps that the scheduler told."""

    at_s: float  # when they came
    records: StepRecords


class Watcher:
    """One stream of news: what waits to be sent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.due = asyncio.Event()
        self._clock = clock
        self._waiting: deque[_Told] = deque()
        self._num_steps = 0
        self._num_dropped = 0
        self._owes_links = True

    def add(self, news: WorkerNews) -> None:
        """The scheduler has told something."""
        self._owes_links |= news.has_links
        self._num_dropped += news.steps.dropped
        if news.steps.duration_s:
            self._waiting.append(_Told(self._clock(), news.steps))
            self._num_steps += len(news.steps.duration_s)
        while self._num_steps > MAX_STEPS:
            num_oldest = len(self._waiting.popleft().records.duration_s)
            self._num_steps -= num_oldest
            self._num_dropped += num_oldest
        self.due.set()

    def pop(self, status: WorkerStatus, links: WorkerStatus) -> WorkerNews:
        """Return all that is due, with the newest status; `links` are the newest that were told."""
        news = WorkerNews(status=status, steps=merged(self._waiting, self._clock()), has_links=self._owes_links)
        if self._owes_links:
            news.status.links.extend(links.links)
        news.steps.dropped = self._num_dropped
        self._waiting.clear()
        self._num_steps = self._num_dropped = 0
        self._owes_links = False
        self.due.clear()
        return news


def merged(told: deque[_Told], now_s: float) -> StepRecords:
    """Return steps of several messages as one that is made now."""
    merged = StepRecords()
    for at_s, records in told:
        waited_s, num_before = now_s - at_s, len(merged.duration_s)
        merged.began_s.extend([began_s + waited_s for began_s in records.began_s])
        merged.duration_s.extend(records.duration_s)
        merged.prompt_tokens.extend(records.prompt_tokens)
        merged.output_tokens.extend(records.output_tokens)
        merged.requests.extend(records.requests)
        merged.context_tokens.extend(records.context_tokens)
        merged.prompt_pairs.extend(records.prompt_pairs)
        merged.prompts.extend(records.prompts)
        merged.host_s.extend(records.host_s)
        merged.handed.extend(StepMark(step=num_before + mark.step, room=mark.room) for mark in records.handed)
        merged.joined.extend(StepMark(step=num_before + mark.step, room=mark.room) for mark in records.joined)
    return merged


class Watchers:
    """All watchers of an instance, and what the scheduler told last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watchers: set[Watcher] = set()
        self._status: WorkerStatus | None = None  # without links
        self._links: WorkerStatus | None = None
        self._leased_s = -math.inf  # when the scheduler was last asked

    def open(self) -> Watcher:
        """Begin to watch. Raises `Overloaded`."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} watch this worker already")
        watcher = Watcher(self._clock)
        if self._watchers and self._status is not None:
            watcher.due.set()  # what the others know
        self._watchers.add(watcher)
        return watcher

    def close(self, watcher: Watcher) -> None:
        """End a watch. What was told to the last watcher is old when the next one comes."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._status = self._links = None
            self._leased_s = -math.inf

    def takes_lease(self) -> bool:
        """Whether the scheduler is to be asked now for another lease: the caller asks it."""
        now_s = self._clock()
        if now_s - self._leased_s < RENEW_S:
            return False
        self._leased_s = now_s
        return True

    def on_news(self, news: WorkerNews) -> None:
        """The scheduler tells what it did. What comes before it has told all is an earlier watcher's."""
        if not self._watchers:
            return  # the last one has gone; the lease ends soon
        if news.has_links:
            self._links = WorkerStatus(links=news.status.links)
        if self._links is None:
            return
        self._status = news.status
        self._status.ClearField("links")
        for watcher in self._watchers:
            watcher.add(news)

    def pop(self, watcher: Watcher) -> WorkerNews:
        """Return what is due to a watcher; its `due` is set."""
        assert self._status is not None
        assert self._links is not None
        return watcher.pop(self._status, self._links)
