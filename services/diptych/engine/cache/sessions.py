"""Sessions that have called a tool: which text is expected to go on, and for how long its pages are kept. Pure.

A router says that a request which ended here has called a tool (`called`): so its output said, or the client where no
calls are read. From then on the session is away, and its pages are pinned for as long as `ReturnTimes` finds worth it.
A request that arrives with the text of one who is away is that session, which has come back: nobody says so, and no
header is believed. It takes over when the job began, by which policies let it go before new jobs of its tenant, if
these came less than `policies.AHEAD_S` before it, and its pin, which then holds while it waits to be admitted.

All of this may be lost: a word that does not come, or too late, costs a session what it would have cost without.
Bounded: `MAX_ENDED` requests that ended, and `MAX_AWAY` sessions. The node that is known of each is the tree's while
its text is cached, and has no tokens any more when that is gone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.engine.cache.return_times import EDGES_S, ReturnTimes, ToolKey, bucket_of
from diptych.engine.cache.tier import POOL
from diptych.engine.cache.tree.pins import Pin
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.values.request import Request, page_names
from diptych.generation.request_groups import MAX_TOOL_LEN

MAX_ENDED: Final = 4096
MAX_EARLY: Final = 256  # words of requests that have not ended here, or never were
MAX_AWAY: Final = 1024
MAX_LEFT: Final = 64  # texts that nobody has asked for
LOOK_S: Final = 1.0  # between two looks at who is still away
BACK_S: Final = 600.0  # that a session which has come back may wait for its pages in peace
MOST_CHANGED: Final = 512  # tokens at the end of a prompt by which the next one may differ: templates rewrite them
SHARE_CHANGED: Final = 8  # an eighth of a short prompt


class _Ended(NamedTuple):
    node: Node
    tenant: str
    anchor: int  # pages, with which whatever goes on from here begins
    job_since_s: float
    computed_by: int


class Left(NamedTuple):
    """The text of a session that is away, and kept, of which another worker computed the prompt."""

    room: int  # of the request that called the tool
    node: Node
    computed_by: int
    wait_s: float  # that its return is likely to take, with those that do not come
    until_s: float  # when it is not waited for any more


@dataclass(slots=True, eq=False)
class _Away:
    """A session between a call and its answer."""

    room: int  # of the request that called
    since_s: float
    key: ToolKey
    node: Node
    place: tuple[int, int]  # number of pages, and the name of the last of them
    job_since_s: float
    bucket: int = 0  # of time, up to which it is known to have been away


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
        *,
        is_on: bool,
        reload_share: float,
    ) -> None:
        """`reload_share`: what a page costs that comes from a tier, beside one that is computed."""
        self._tree = tree
        self._page_size = page_size
        self._is_on = is_on
        self._reload_share = reload_share
        self._times = times
        self._looked_s = 0.0  # at who is still away
        self._ended: OrderedDict[int, _Ended] = OrderedDict()  # by room
        self._early: OrderedDict[int, str] = OrderedDict()  # tools, by room
        self._away: OrderedDict[tuple[int, int], _Away] = OrderedDict()  # by place, the longest away first
        self._lens: dict[int, int] = {}  # how many of `_away` have so many pages
        self.left: deque[Left] = deque(maxlen=MAX_LEFT)  # for whoever may bring them to where they go on
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
        self._ended[request.room] = _Ended(node, request.account.tenant, anchor, since_s, request.computed_by)
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
        key = ToolKey(ended.tenant, tool[:MAX_TOOL_LEN])
        away = _Away(room, now_s, key, ended.node, place, ended.job_since_s)
        self._leave(away)
        ttl_s = self._pin(away, now_s)
        if ttl_s > 0 and ended.computed_by:
            wait_s = self._times.wait_s(key, ttl_s)
            self.left.append(Left(room, away.node, ended.computed_by, wait_s, now_s + ttl_s))

    def extended(self, node: Node, room: int) -> None:
        """More of the text that a request has left has come from a peer, up to `node`: its pin moves there.

        No other pin does: what else begins with the text of a session may go on otherwise.
        """
        away = next((each for each in self._away.values() if each.room == room), None)
        if away is None or away.node is node or away.node not in node.path():
            return
        old, away.node = away.node, node
        pin, known = self._tree.pins.get(old), self._tree.pins.get(node)
        if pin is None:
            return
        if known is None or known.until_s < pin.until_s:
            self._tree.pin(node, pin)
        if all(each.node is not old for each in self._away.values()):
            self._tree.unpin(old)

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
            pin = Pin(None, now_s, away.job_since_s, now_s + BACK_S)
            self._tree.pin(away.node, pin)
            request.pinned = away.node, pin

    def waits_no_more(self, request: Request) -> None:
        """It holds its text itself, or has ended or was refused without: its pin goes, unless another replaced it."""
        if request.pinned is not None:
            node, pin = request.pinned
            request.pinned = None
            if self._tree.pins.get(node) is pin:
                self._tree.unpin(node)

    def _find(self, request: Request) -> _Away | None:
        """Return the one of those away with whose text the request begins; of several, who has most of it."""
        names = page_names(request, self._page_size)
        for num_pages in sorted(self._lens, reverse=True):
            if num_pages <= len(names) and (num_pages, names[num_pages - 1]) in self._away:
                return self._away[num_pages, names[num_pages - 1]]
        return None

    def _pin(self, away: _Away, now_s: float) -> float:
        """Keep its text for as long as that is worth it; return for how long."""
        node, key = away.node, away.key
        num_saved, num_held = self._tree.alone(node)
        if node.level != POOL or not num_saved:
            return 0.0  # what others have in common with it stays for their sake
        price = self._tree.price() * num_held / (num_saved * self._reload_share)
        ttl_s = self._times.ttl_s(key, price)
        if ttl_s > 0:
            self._tree.pin(node, Pin(key, now_s, away.job_since_s, now_s + ttl_s))
        return ttl_s

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
