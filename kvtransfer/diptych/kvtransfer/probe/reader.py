"""The reading side of link tests: lends probe pages to one writer at a time each, and says what it finds in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych.kvtransfer.probe.actions import Action, Digest, Done, Failed, Passed, SendProbeNote
from diptych.kvtransfer.probe.notes import ProbeAsk, ProbeCheck, ProbeEnd, ProbeFound, ProbeNote, ProbeOffer

TIMEOUT_S: Final = 30.0  # without a word of the writer, which may have many links to test
MAX_LOANS: Final = 4

Loan = tuple[int, ...]  # pages


@dataclass(slots=True)
class _Test:
    deadline_s: float
    loan: Loan = ()
    has_failed: bool = False  # the link is being closed


class ReaderTests:
    """One direction of `TwoWayTests`, whose methods it has: for workers whose pages peers write."""

    def __init__(self, probe_pages: Sequence[int], page_size: int) -> None:
        self._page_size = page_size
        num_loans = min(MAX_LOANS, len(probe_pages))
        size = len(probe_pages) // num_loans
        pages = list(probe_pages)
        self._free: deque[Loan] = deque(tuple(pages[i * size : (i + 1) * size]) for i in range(num_loans))
        self._asking: deque[int] = deque()  # peers that wait for a loan
        self._tests: dict[int, _Test] = {}

    def begin(self, peer: int, paths: tuple[str, ...], now_s: float) -> list[Action]:
        self._tests[peer] = _Test(now_s + TIMEOUT_S)
        return []

    def receive(self, peer: int, note: ProbeNote, now_s: float) -> list[Action]:
        test = self._tests.get(peer)
        if test is None or test.has_failed:
            return []
        test.deadline_s = now_s + TIMEOUT_S
        match note:
            case ProbeAsk() if not test.loan and peer not in self._asking:
                self._asking.append(peer)
                return self._lend()
            case ProbeCheck() if test.loan:
                return [Digest(peer, test.loan)]
            case ProbeEnd(path, bytes_per_s) if path:
                return [Passed(peer, path, bytes_per_s, inbound=path), *self._forget(peer)]
            case ProbeEnd(_, _, reason):
                return self._fail(peer, test, reason)
        return []

    def done(self, peer: int, done: Done, now_s: float) -> list[Action]:
        test = self._tests.get(peer)
        if test is None or test.has_failed:
            return []
        if done.error is not None:
            return self._fail(peer, test, done.error)
        return [] if done.digest is None else [SendProbeNote(peer, ProbeFound(done.digest))]

    def end(self, peer: int, now_s: float) -> list[Action]:
        return self._forget(peer) if peer in self._tests else []

    def expire(self, now_s: float) -> list[Action]:
        late = [peer for peer, test in self._tests.items() if not test.has_failed and test.deadline_s <= now_s]
        reason = f"the peer, which should test the link, said nothing for {TIMEOUT_S:g} s"
        return [action for peer in late for action in self._fail(peer, self._tests[peer], reason)]

    def next_deadline_s(self) -> float | None:
        return min((test.deadline_s for test in self._tests.values() if not test.has_failed), default=None)

    def _lend(self) -> list[Action]:
        offers: list[Action] = []
        while self._asking and self._free:
            peer = self._asking.popleft()
            self._tests[peer].loan = self._free.popleft()
            offers.append(SendProbeNote(peer, ProbeOffer(self._tests[peer].loan, self._page_size)))
        return offers

    def _forget(self, peer: int) -> list[Action]:
        """Take back what was lent. The loan that came back last is lent last: a late writer may still touch it."""
        loan = self._tests.pop(peer).loan
        if loan:
            self._free.append(loan)
        if peer in self._asking:
            self._asking.remove(peer)
        return self._lend()

    def _fail(self, peer: int, test: _Test, reason: str) -> list[Action]:
        test.has_failed = True
        return [Failed(peer, reason)]
