"""Sessions that have called a tool: which text is expected to go on, and for how long its pages are kept. Pure.

A router says that a request which ended here has called a tool (`called`). From then on the session is away, and its
pages are pinned for as long as `ReturnTimes` finds worth it. A request that arrives with the text of one who is away is
that session, which has come back: nobody says so, and no header is believed. It takes over when the job began, by
which policies let it go before new jobs, and its pin, which then holds until it is admitted.

All of this may be lost: a word that does not come, or too late, costs a session what it would have cost without.
Bounded: `MAX_ENDED` requests that ended, and `MAX_AWAY` sessions.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.engine.cache.pins import Pin, Pins
from diptych.engine.cache.radix import RadixTree
from diptych.engine.cache.radix_node import Node
from diptych.engine.cache.return_times import EDGES_S, ReturnTimes, ToolKey, bucket_of
from diptych.engine.cache.tier import POOL
from diptych.engine.values.request import Request, page_names
from diptych.generation.request_groups import MAX_TOOL_LEN, Account

MAX_ENDED: Final = 4096
MAX_EARLY: Final = 256  # words of requests that have not ended here, or never were
MAX_AWAY: Final = 1024
LOOK_S: Final = 1.0  # between two looks at who is still away
HOLD_S: Final = 60.0  # that a new request lets memory be kept for older jobs
BACK_S: Final = 600.0  # that a session which has come back may wait for its pages in peace
MOST_CHANGED: Final = 512  # tokens at the end of a prompt by which the next one may differ: templates rewrite them
SHARE_CHANGED: Final = 8  # an eighth of a short prompt


class _Ended(NamedTuple):
    node: Node
    account: Account
    anchor: int  # pages, with which whatever goes on from here begins
    job_since_s: float


@dataclass(slots=True, eq=False)
class _Away:
    """A session between a call and its answer."""

    since_s: float
    key: ToolKey
    node: Node
    place: tuple[int, int]  # number of pages, and the name of the last of them
    job_since_s: float
    account: Account
    bucket: int = 0  # of time, up to which it is known to have been away


class Hold:
    """Why requests of one account wait: memory is kept for older jobs. Implements `Reason`.

    All wait for the first of them that finds memory: then it is over, and each is looked at again.
    """

    def __init__(self, pins: Pins, account: Account, num_available: Callable[[], int]) -> None:
        self._pins = pins
        self._account = account
        self._num_available = num_available
        self._wanted: dict[float, int] = {}  # pages, by when the job began: the oldest, and who wants least
        self._until_s = math.inf
        self.is_old = False  # it was over once

    @property
    def until_s(self) -> float:
        return min(self._until_s, self._pins.next_s)

    def note(self, num_pages: int, job_since_s: float, until_s: float) -> None:
        """One more waits, for so many pages."""
        self._until_s = min(self._until_s, until_s)
        self._wanted[job_since_s] = num_pages
        kept = {min(self._wanted), min(self._wanted, key=lambda since_s: self._wanted[since_s])}
        self._wanted = {since_s: self._wanted[since_s] for since_s in kept}

    def is_over(self, now_s: float) -> bool:
        num_available = self._num_available()
        self.is_old = now_s >= self._until_s or any(
            num_pages <= num_available - self._pins.kept_from(self._account, since_s)
            for since_s, num_pages in self._wanted.items()
        )
        return self.is_old


@dataclass(slots=True)
class SessionCounts:
    """Since start."""

    calls: int = 0  # of tools, of which routers told
    returns: int = 0  # of their sessions
    kept_returns: int = 0  # that found their pages pinned


class Sessions:
    """The sessions of one cache."""

    def __init__(
        self,
        tree: RadixTree,
        times: ReturnTimes,
        page_size: int,
        num_available: Callable[[], int],
        *,
        is_on: bool,
        reload_share: float,
    ) -> None:
        """`reload_share`: what a page costs that comes from a tier, beside one that is computed."""
        self._tree = tree
        self._page_size = page_size
        self._num_available = num_available  # pages of the pool
        self._holds: dict[Account, Hold] = {}
        self._is_on = is_on
        self._reload_share = reload_share
        self._times = times
        self._looked_s = 0.0  # at who is still away
        self._ended: OrderedDict[int, _Ended] = OrderedDict()  # by room
        self._early: OrderedDict[int, str] = OrderedDict()  # tools, by room
        self._away: OrderedDict[tuple[int, int], _Away] = OrderedDict()  # by place, the longest away first
        self._lens: dict[int, int] = {}  # how many of `_away` have so many pages
        self.counts = SessionCounts()

    @property
    def num_away(self) -> int:
        return len(self._away)

    def ended(self, request: Request, node: Node, now_s: float) -> None:
        """A request has left its text in the cache, up to `node`; it may be one that goes on later."""
        if not self._is_on:
            return
        changed = min(MOST_CHANGED, request.prompt_len // SHARE_CHANGED)
        anchor = (request.prompt_len - changed) // self._page_size
        since_s = request.life.arrival_s - request.job_s
        self._ended[request.room] = _Ended(node, request.account, anchor, since_s)
        self._ended.move_to_end(request.room)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if (tool := self._early.pop(request.room, None)) is not None:
            self.called(request.room, tool, now_s)

    def called(self, room: int, tool: str, now_s: float) -> None:
        """A request that ends here, or is about to, has called a tool: its session is away."""
        if not self._is_on:
            return
        ended = self._ended.pop(room, None)
        if ended is None:
            self._early[room] = tool
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return
        self.counts.calls += 1
        place = _place(ended)
        if place is None:
            return  # it has been evicted already, or is too short
        key = ToolKey(ended.account.tenant, tool[:MAX_TOOL_LEN])
        away = _Away(now_s, key, ended.node, place, ended.job_since_s, ended.account)
        self._leave(away)
        self._pin(away, now_s)

    def arrived(self, request: Request, now_s: float) -> None:
        """A request begins. If it is a session that was away, its job is older than it is."""
        self._look(now_s)
        if not self._away:
            return
        away = self._find(request)
        if away is None:
            return
        self._return(away)
        self._times.returned(away.key, away.bucket, bucket_of(now_s - away.since_s))
        self.counts.returns += 1
        request.job_s = max(0.0, request.life.arrival_s - away.job_since_s)
        if away.node in self._tree.pins:
            self.counts.kept_returns += 1
            request.pinned = away.node
            self._put(away, None, now_s, BACK_S)

    def admitted(self, request: Request) -> None:
        """It holds its text itself."""
        if request.pinned is not None:
            self._tree.unpin(request.pinned)
            request.pinned = None

    def _find(self, request: Request) -> _Away | None:
        """Return the one of those away with whose text the request begins; of several, who has most of it."""
        names = page_names(request, self._page_size)
        for num_pages in sorted(self._lens, reverse=True):
            if num_pages <= len(names) and (num_pages, names[num_pages - 1]) in self._away:
                return self._away[num_pages, names[num_pages - 1]]
        return None

    def hold(self, request: Request, num_pages: int, num_available: int) -> Hold | None:
        """Return why a request that needs so many pages had better wait: there are some, kept for older jobs.

        Those are of its own tenant, and no less important. It does not wait for long, nor where that costs its SLO.
        """
        if not len(self._tree.pins):
            return None
        life, ttft_s = request.life, request.slo.ttft_s
        until_s = life.arrival_s + (min(HOLD_S, ttft_s / 2) if ttft_s else HOLD_S)
        job_since_s = life.arrival_s - request.job_s
        kept = self._tree.pins.kept_from(request.account, job_since_s)
        fits = num_pages <= num_available - kept
        if fits or num_pages > num_available or self._tree.now_s >= until_s:
            return None
        hold = self._holds.get(request.account)
        if hold is None or hold.is_old:
            hold = self._holds[request.account] = Hold(self._tree.pins, request.account, self._num_available)
        hold.note(num_pages, job_since_s, until_s)
        return hold

    def _put(self, away: _Away, key: ToolKey | None, now_s: float, ttl_s: float) -> None:
        num_pages, _ = self._tree.alone(away.node)
        self._tree.pin(away.node, Pin(key, now_s, away.job_since_s, now_s + ttl_s, away.account, num_pages))

    def _pin(self, away: _Away, now_s: float) -> None:
        node, key = away.node, away.key
        num_saved, num_held = self._tree.alone(node)
        if node.level != POOL or not num_saved:
            return  # what others have in common with it stays for their sake
        price = self._tree.price() * num_held / (num_saved * self._reload_share)
        ttl_s = self._times.ttl_s(key, price)
        if ttl_s > 0:
            self._put(away, key, now_s, ttl_s)

    def _leave(self, away: _Away) -> None:
        if (known := self._away.get(away.place)) is not None:
            self._return(known)
        if len(self._away) >= MAX_AWAY:
            self._return(next(iter(self._away.values())))
        self._away[away.place] = away
        self._lens[away.place[0]] = self._lens.get(away.place[0], 0) + 1

    def _return(self, away: _Away) -> None:
        del self._away[away.place]
        num_pages = away.place[0]
        self._lens[num_pages] -= 1
        if not self._lens[num_pages]:
            del self._lens[num_pages]

    def _look(self, now_s: float) -> None:
        """Learn who is still away; who is away for too long is not waited for any more."""
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for away in list(self._away.values()):
            bucket = bucket_of(now_s - away.since_s)
            if bucket > away.bucket:
                self._times.passed(away.key, away.bucket, bucket)
                away.bucket = bucket
            if bucket == len(EDGES_S):
                self._return(away)


def _place(ended: _Ended) -> tuple[int, int] | None:
    """Return the number of pages of an anchor and the name of its last, if its text is cached."""
    if not ended.anchor:
        return None
    for step in ended.node.path():
        first = step.end - len(step.pages)
        if first < ended.anchor <= step.end:
            return ended.anchor, step.hashes[ended.anchor - 1 - first].item()
    return None
