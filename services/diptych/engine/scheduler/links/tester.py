"""Performs the tests of new links over a transport; `diptych.kvtransfer.probe` decides them.

What a full transport refuses is tried again with the next event.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from diptych.kvtransfer.errors import MalformedNote, PeerUnreachable, TransferError, TransferQueueFull
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.lanes import PathRule
from diptych.kvtransfer.probe import notes
from diptych.kvtransfer.probe.actions import (
    Action,
    Digest,
    Done,
    Failed,
    FillProbe,
    Measure,
    Passed,
    SendProbeNote,
    UsePath,
    Write,
)
from diptych.kvtransfer.probe.notes import Directions, ProbeNote, ProbeOffer
from diptych.kvtransfer.probe.reader import ReaderTests
from diptych.kvtransfer.probe.two_way import TwoWayTests
from diptych.kvtransfer.probe.writer import WriterTests
from diptych.kvtransfer.transport import OpDone, PageIndices, PageWrite, PeerTransport, ProbePages

logger = logging.getLogger(__name__)

SOURCE_STRIDE: Final = 7919  # measured pages lie far apart: what a cache holds would look too fast

Verdict = Passed | Failed


@dataclass(frozen=True, slots=True)
class _Operation:
    """A transfer of a test that is under way."""

    action: Action
    nbytes: int
    began_s: float

    @property
    def peer(self) -> int:
        return self.action.peer


class LinkTester:
    """Tests links; every call returns the verdicts that it led to."""

    def __init__(
        self,
        transport: PeerTransport,
        pool: ProbePages,
        directions: Directions,
        rule: PathRule,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pages may go as `directions` says at this process."""
        reader = ReaderTests(pool.probe_pages.tolist(), pool.layout.page_size)
        self._tests = TwoWayTests(transport.instance_id, directions, WriterTests(random.Random()), reader)
        self._transport = transport
        self._pool = pool
        self._rule = rule  # of what we write
        self._inbound_rule = replace(rule, pinned="auto")  # what is written here need only be fast enough
        self._clock = clock
        self._operations: dict[int, _Operation] = {}
        self._queue: deque[Action] = deque()

    @property
    def page_nbytes(self) -> int:
        return self._pool.layout.page_nbytes

    def serve(self, directions: Directions) -> None:
        """Pages may go in other directions at this end, over links that come up from now on."""
        self._tests.directions = directions

    def covers(self, peer: int) -> bool:
        """Whether the open link to a peer is tested in every direction that may be needed now."""
        return self._tests.covers(peer)

    def begin(self, peer: int) -> list[Verdict]:
        """Test a link that came up."""
        try:
            paths, info = self._transport.paths(peer), self._transport.describe(peer)
        except PeerUnreachable:
            return []  # it is down already; that is the next event
        logger.info("testing the link to %016x: %s; paths: %s", peer, info, ", ".join(paths))
        if not self._inbound_rule.allowed(paths, info.lanes):
            return [Failed(peer, self._inbound_rule.refusal(paths, info.lanes))]
        allowed = self._rule.allowed(paths, info.lanes)
        refusal = "" if allowed else self._rule.refusal(paths, info.lanes)
        return self._perform(self._tests.begin(peer, allowed, self._clock(), refusal))

    def receive(self, peer: int, data: bytes) -> list[Verdict]:
        """Handle a note of a link that is tested."""
        try:
            note = notes.decode(data, sender=peer, target=self._transport.instance_id)
        except MalformedNote as error:
            logger.error("dropped a note from %016x: %s", peer, error)
            return []
        return self._perform(self._tests.receive(peer, note, self._clock()))

    def done(self, event: OpDone) -> list[Verdict] | None:
        """Return None for an operation that is not a test's."""
        operation = self._operations.pop(event.op, None)
        if operation is None:
            return None
        seconds = event.seconds or self._clock() - operation.began_s  # the latter includes a step of ours
        done = Done(event.error, event.digest, operation.nbytes, seconds)
        return self._perform(self._tests.done(operation.action, done, self._clock()))

    def end(self, peer: int) -> list[Verdict]:
        """The link is down."""
        self._operations = {op: each for op, each in self._operations.items() if each.peer != peer}
        self._drop_queued(peer)
        return self._perform(self._tests.end(peer, self._clock()))

    def expire(self) -> list[Verdict]:
        """End what takes too long, and try again what was refused."""
        return self._perform(self._tests.expire(self._clock()))

    def next_deadline_s(self) -> float | None:
        return self._tests.next_deadline_s()

    def _perform(self, actions: Iterable[Action]) -> list[Verdict]:
        self._queue.extend(actions)
        verdicts: list[Verdict] = []
        while self._queue:
            action = self._queue[0]
            try:
                if isinstance(action, Passed | Failed):
                    verdicts.append(self._checked(action))
                else:
                    self._start(action)
            except TransferQueueFull:
                break
            except TransferError as error:
                verdicts += self._refused(action, str(error))
                continue
            self._queue.popleft()
        return verdicts

    def _refused(self, action: Action, reason: str) -> list[Verdict]:
        """What was to follow must not happen any more."""
        has_verdict = any(isinstance(each, Passed | Failed) for each in self._queue if each.peer == action.peer)
        self._drop_queued(action.peer)
        if has_verdict:
            return [Failed(action.peer, reason)]
        self._queue.extend(self._tests.done(action, Done(reason), self._clock()))
        return []

    def _checked(self, verdict: Verdict) -> Verdict:
        """The reading side hears of the path only now; the writing side has tried none but allowed ones."""
        if isinstance(verdict, Passed) and verdict.inbound:
            lanes, paths = self._transport.describe(verdict.peer).lanes, (verdict.inbound,)
            if not self._inbound_rule.allowed(paths, lanes):
                return Failed(verdict.peer, self._inbound_rule.refusal(paths, lanes), verdict.results)
        return verdict

    def _start(self, action: Action) -> None:
        transport = self._transport
        match action:
            case FillProbe(_, seed):
                self._pool.fill_pattern(seed)
            case UsePath(peer, path):
                transport.use_path(peer, path)
            case SendProbeNote(peer, note):
                if isinstance(note, ProbeOffer):  # until the pages are lent to another peer
                    transport.grant_pages(peer, np.array(note.pages))
                self._expect(transport.send_note(peer, self._encoded(peer, note)), action)
            case Write(peer, offer, note):
                pattern = self._pool.pattern_pages
                src = pattern[np.arange(self._num_sources(offer, 1)) % len(pattern)]
                write, flow = PageWrite(src, np.array(offer.pages)), Flow(with_digest=True)
                self._expect(transport.write_pages(peer, write, self._encoded(peer, note), flow), action)
            case Measure(peer, offer, num_rounds):
                src = self._any_pages(self._num_sources(offer, num_rounds))
                write = PageWrite(src, np.tile(np.array(offer.pages), num_rounds))
                self._expect(transport.write_pages(peer, write), action, len(src) * self.page_nbytes)
            case Digest(_, pages):
                self._expect(transport.digest_pages(np.array(pages)), action)

    def _expect(self, operation: int, action: Action, nbytes: int = 0) -> None:
        self._operations[operation] = _Operation(action, nbytes, self._clock())

    def _encoded(self, peer: int, note: ProbeNote) -> bytes:
        return notes.encode(note, sender=self._transport.instance_id, target=peer)

    def _num_sources(self, offer: ProbeOffer, num_rounds: int) -> int:
        """Return how many pages of ours hold as many tokens as the offered ones."""
        return -(-len(offer.pages) * num_rounds * offer.page_size // self._pool.layout.page_size)

    def _any_pages(self, count: int) -> PageIndices:
        return np.arange(count) * SOURCE_STRIDE % self._pool.layout.num_pages

    def _drop_queued(self, peer: int) -> None:
        self._queue = deque(action for action in self._queue if action.peer != peer)
