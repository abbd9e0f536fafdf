"""What a worker that leaves has cached, offered to its peers: the giver's side. `pulling` has the taker's.

An offer is a text and how much it was used; who lacks it and has room pulls it as anything else, and says in the end
what came of it. Nothing waits for offers but the drain, and that only until its time for them is over. Whatever goes
wrong with one costs a text that is computed again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.values.core_report import CoreCounts, CoreReport, Holders
from diptych.engine.values.events import Effect, SendNote
from diptych.kvtransfer.notes import Offer, OfferEnded
from diptych.unified.giving_order import Run, giving_order, takers
from diptych.unified.pull import pull_id

MAX_OFFERED: Final = 4  # to one peer at a time
MAX_TRIES: Final = 3  # of one text, at different peers
MAX_WAITING: Final = 64  # texts that wait for their peers are looked at in vain

ComputeSeconds = Callable[[int, int], float]  # behind so many tokens of a prompt, so many more; infinite: not known


@dataclass(slots=True, eq=False)
class _Text:
    """The prefix that ends at a node."""

    node: Node
    tried: set[int] = field(default_factory=set)  # peers to whom it was offered

    @property
    def name(self) -> int:
        return int(self.node.hashes[-1])


@dataclass(frozen=True, slots=True)
class _Offered:
    text: _Text
    peer: int


class Giving:
    """What it has to say goes to `effects`. Nothing is offered before `begin`."""

    def __init__(self, cache: KvCache, compute_s: ComputeSeconds, effects: list[Effect], *, is_on: bool) -> None:
        self._cache = cache
        self._compute_s = compute_s
        self._effects = effects
        self._is_on = is_on
        self._counts = CoreCounts()
        self._texts: deque[_Text] = deque()  # that are still to be offered, the best first
        self._offered: dict[int, _Offered] = {}  # by number, until it is answered
        self._linked: set[int] = set()
        self._full: set[int] = set()  # peers that take nothing more
        self._until_s = -math.inf
        self.is_leaving = False

    def begin(self, within_s: float, now_s: float) -> None:
        """Offer what is cached for so long; 0: nothing, or nothing more. From now on nothing of others is taken."""
        self.is_leaving = True
        if within_s <= 0 or not self._is_on or self._cache.pages_per_state:
            self._stop()
            return
        self._until_s = now_s + within_s
        self._texts = deque(self._pick(now_s))
        self._go_on(now_s)

    def peer_up(self, peer: int, now_s: float) -> None:
        self._linked.add(peer)
        self._go_on(now_s)

    def peer_down(self, peer: int, now_s: float) -> None:
        """What was offered over the link goes to others."""
        self._linked.discard(peer)
        for number in [number for number, each in self._offered.items() if each.peer == peer]:
            self.on_ended(peer, OfferEnded(number, "failed"), now_s)

    def on_ended(self, peer: int, note: OfferEnded, now_s: float) -> None:
        """A peer says what came of an offer."""
        offered = self._offered.get(note.room)
        if offered is None or offered.peer != peer:
            return  # it came twice, or too late
        del self._offered[note.room]
        self._counts.pages_given += note.num_pages
        if note.outcome not in ("taken", "known"):
            self._full |= {peer} if note.outcome in ("full", "refused") else set()
            self._texts.appendleft(offered.text)
        self._go_on(now_s)

    def expire(self, now_s: float) -> None:
        if (self._texts or self._offered) and now_s >= self._until_s:
            self._stop()

    def next_s(self) -> float | None:
        """Return when `expire` has something to do."""
        return self._until_s if self.is_open else None

    @property
    def is_open(self) -> bool:
        """Whether a drain has to wait."""
        return bool(self._texts or self._offered)

    def report(self) -> CoreReport:
        """Return what it has counted. Its pages are the tree's; all that it does counts as one room."""
        return CoreReport(int(self.is_open), Holders(), self._counts)

    def _stop(self) -> None:
        self._texts.clear()
        self._offered.clear()

    def _pick(self, now_s: float) -> list[_Text]:
        nodes = list(self._cache.tree.in_pool())
        places = {node: place for place, node in enumerate(nodes)}
        runs = [_run(node, places, now_s) for node in nodes]
        size = self._cache.page_size
        order = giving_order(runs, lambda first, count: self._compute_s(first * size, count * size))
        return [_Text(nodes[place]) for place in order]

    def _go_on(self, now_s: float) -> None:
        """Offer what there is somebody for. A text whose next peer is busy waits for it, and lets others pass."""
        waiting: list[_Text] = []
        while self._texts and len(waiting) < MAX_WAITING and (free := self._free_peers()):
            text = self._texts.popleft()
            if is_here(text.node):
                self._offer_to(free, text, waiting, now_s)
        self._texts.extendleft(reversed(waiting))
        if self._texts and not self._open_peers():
            self._counts.offers_declined += len(self._texts)
            self._texts.clear()

    def _offer_to(self, free: Collection[int], text: _Text, waiting: list[_Text], now_s: float) -> None:
        wanted = takers(text.name, self._open_peers(), text.tried)
        number = pull_id(text.name)
        if not wanted or len(text.tried) >= MAX_TRIES:
            self._counts.offers_declined += 1
        elif wanted[0] not in free or number in self._offered:
            waiting.append(text)
        else:
            self._offer(text, wanted[0], number, now_s)

    def _open_peers(self) -> set[int]:
        return self._linked - self._full

    def _free_peers(self) -> set[int]:
        """Peers to whom one more text can be offered now."""
        busy = [each.peer for each in self._offered.values()]
        return {peer for peer in self._open_peers() if busy.count(peer) < MAX_OFFERED}

    def _offer(self, text: _Text, peer: int, number: int, now_s: float) -> None:
        text.tried.add(peer)
        self._offered[number] = _Offered(text, peer)
        idle_s = max(0.0, now_s - text.node.used_s)
        offer = offer_of(self._cache, text.node, number, idle_s=idle_s, within_s=self._until_s - now_s)
        self._effects.append(SendNote(peer, offer))


def offer_of(cache: KvCache, node: Node, number: int, *, idle_s: float, within_s: float) -> Offer:
    """Return the offer of the text that ends at a node."""
    tokens, extra_key = cache.tree.text_of(node)
    return Offer(
        room=number,
        kv=cache.made_by,
        namespace=extra_key,
        tokens=tokens.astype("<i8").tobytes(),
        page_size=cache.page_size,
        idle_s=idle_s,
        num_uses=node.num_uses,
        within_s=within_s,
    )


def _run(node: Node, places: dict[Node, int], now_s: float) -> Run:
    assert node.parent is not None
    first = node.end - len(node.pages)
    return Run(places.get(node.parent, -1), first, len(node.pages), node.num_uses, max(0.0, now_s - node.used_s))


def is_here(node: Node) -> bool:
    """Whether it is still in the pool, and found there."""
    return node.parent is not None and node.num_pool_pages > 0 and not node.is_withdrawn
