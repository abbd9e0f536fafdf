"""Decides which cached page goes first: the order of the unlocked nodes of a radix tree.

A node's rank is (score, time of its last touch, minus its end). The score is the strategy, and ages: that of a touched
node starts from that of what was evicted last, so what was popular or worth much once does not stay for ever.
LFU counts uses (with dynamic aging: Arlitt et al., "Evaluating content management techniques for Web proxy caches",
2000). LRU scores all tokens alike; where states are cached it asks what share of the pages that a hit needs are of
tokens, which it saves (GreedyDual-Size: Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997). So a short
text with a state goes before a long one, a conversation of one turn before one that has gone on, and first of all goes
text behind which nobody can begin.

A state that is superseded is ranked by itself, and lower than a text that is worth as much, since few begin with it.

Once it is learned which conversations go on (`turns`), another text may go in the place of the lowest one that has a
state: it *sinks*, and the lowest one is spared.

A path is touched from its deep end to the root, and no node scores less than what is touched below it; of two halves
of a node the deeper ranks lower. Hence no node outranks its parent, and the lowest is a leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from diptych.engine.cache.tree.radix_node import Node, Rank
from diptych.engine.values.policy_names import EvictionPolicy

SCALE: Final = 1000  # the worth of pages of tokens alone
RARER: Final = 3  # times: how much less a superseded state is begun with
SUNK: Final = -1  # the score of what goes before all else
MAX_TURNS: Final = 3  # that count: who has gone on goes on, but not without end

Score = Callable[[int, int], int]  # (uses of the node, its worth) -> score of one that is not aged


def lru(num_uses: int, worth: int) -> int:
    return worth


def lfu(num_uses: int, worth: int) -> int:
    return num_uses


SCORES: Final[Mapping[EvictionPolicy, Score]] = {"lru": lru, "lfu": lfu}


class Worth(NamedTuple):
    """What a node with a state is worth."""

    once: int  # of the text up to it, when it is found
    turns: int  # how often that is expected
    alone: int  # of its state, when that is superseded


NO_STATE: Final = Worth(0, 1, 0)  # what a node without one is worth


def worths(path: Sequence[Node]) -> dict[Node, Worth]:
    """Return what each node with a state is worth. The path begins with its deep end.

    A state saves the tokens behind the one before it. A node saves those, too, that are behind states which will be
    superseded, as its own will stay for longer; and it does so more often the more turns of a conversation have used
    the text that no other has.
    """
    found: dict[Node, Worth] = {}
    parting, before, turns = 0, 0, 0  # pages where others begin: without what is superseded, and with that
    for node in reversed(path):
        turns = turns or min(max(1, node.num_uses), MAX_TURNS)
        is_parting = len(node.children) > 1
        if node.state is not None:
            size = len(node.state)
            found[node] = Worth(_worth(node.end - parting, size), turns, _worth(node.end - before, size))
            before = node.end
            parting = node.end if is_parting else parting
        turns = 0 if is_parting else turns
    return found


def _worth(num_saved: int, size: int) -> int:
    return SCALE * num_saved // (num_saved + size)


class Ranking:
    """Gives nodes and their states their ranks, which only rise, until a node sinks."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._score = SCORES[policy]
        self.is_by_worth = policy == "lru"  # where states are
        self._age = 0
        self._clock = 0
        self.now_s = 0.0
        self.num_come = 0  # pages, to the pool since start: the time by which turns are counted

    def touch(self, node: Node) -> None:
        """Count the path to `node` as wanted now."""
        path = list(node.path())
        for step in path:
            step.used_s, step.used_at = self.now_s, self.num_come
        self._rank(path)

    def spare(self, node: Node) -> None:
        """Another one goes in the place of `node`, which is the lowest: it stands as if it were wanted now."""
        self.note_eviction(node.rank)
        self._rank(list(node.path()))

    def sink(self, node: Node) -> list[Node]:
        """Let the text that leads to `node` alone be evicted before all else; return its nodes.

        What follows it lies in tiers, and goes before it there.
        """
        sunk = [*reversed(list(node.below())), node]
        for step in node.path():
            if step is not node:
                if step.num_locks or step.num_pins or step.state is not None or len(step.children) > 1:
                    break
                sunk.append(step)
        for step in sunk:
            self._clock += 1
            step.rank = (SUNK, self._clock, -step.end)
        return sunk

    def _rank(self, path: Sequence[Node]) -> None:
        if all([node.state is None for node in path]):
            self._rank_tokens(path)
            return
        score = 0
        found = worths(path)
        for step in path:
            self._clock += 1
            worth = found.get(step, NO_STATE)
            step.worth = worth.once
            score = max(score, step.rank[0], self._score(step.num_uses, worth.turns * worth.once) + self._age)
            step.rank = (score, self._clock, -step.end)
            alone = self._score(0, worth.alone // RARER) + self._age
            step.state_rank = (max(alone, step.state_rank[0]), self._clock, -step.end)

    def _rank_tokens(self, path: Sequence[Node]) -> None:
        """Rank a path without states."""
        score = 0
        for step in path:
            self._clock += 1
            step.worth = NO_STATE.once
            score = max(score, step.rank[0], self._score(step.num_uses, NO_STATE.once) + self._age)
            step.rank = (score, self._clock, -step.end)

    def touch_new(self, node: Node) -> None:
        """Rank a node by itself, whose path will be touched before anything is evicted, or is locked."""
        self._clock += 1
        node.used_s, node.used_at = self.now_s, self.num_come
        node.rank = (max(node.rank[0], self._age), self._clock, -node.end)

    def standing(self, num_uses: int, idle_s: float) -> tuple[int, float]:
        """Return where a text stands that others have used so often, so long ago; higher: it goes later."""
        return self._score(num_uses, 0) + self._age, self.now_s - idle_s

    def note_eviction(self, rank: Rank) -> None:
        self._age = max(self._age, rank[0])


class EvictionQueue:
    """The unlocked nodes of one level that no pin keeps. All operations are O(log n), amortised.

    Lazy: an entry keeps the rank it came with, and moves or goes when it gets to the front. That is enough because
    ranks rise, but for nodes that sink: those get one more entry. Of several the first that gets to the front counts.
    """

    def __init__(self, level: int, rank_of: Callable[[Node], Rank] = attrgetter("rank")) -> None:
        self._level = level
        self._rank_of = rank_of
        self._heap: list[tuple[Rank, Node]] = []
        self._members: set[Node] = set()  # that have an entry

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def add(self, node: Node) -> None:
        """Let an unlocked node be evicted."""
        if node not in self._members:
            self._members.add(node)
            heapq.heappush(self._heap, (self._rank_of(node), node))

    def sunk(self, node: Node) -> None:
        """The rank of a node has fallen."""
        if node in self._members:
            heapq.heappush(self._heap, (self._rank_of(node), node))

    def pop(self) -> Node | None:
        """Take out the unlocked node of the lowest rank; None when there is none."""
        node = self.peek()
        if node is not None:
            self._drop_front()
        return node

    def peek(self) -> Node | None:
        """Return the unlocked node of the lowest rank; None when there is none."""
        while self._heap:
            rank, node = self._heap[0]
            if node not in self._members:
                heapq.heappop(self._heap)
            elif self._is_stale(node):
                self._drop_front()
            elif rank == self._rank_of(node):
                return node
            else:
                heapq.heapreplace(self._heap, (self._rank_of(node), node))
        return None

    def num_pages_below(self, standing: tuple[int, float]) -> int:
        """Return how many pages of tokens stand no higher, by score and last use. O(nodes)."""
        below = (node for node in self._members if (node.rank[0], node.used_s) <= standing)
        return sum([len(node.pages) for node in below if not self._is_stale(node)])

    def _drop_front(self) -> None:
        _, node = heapq.heappop(self._heap)
        self._members.remove(node)

    def _is_stale(self, node: Node) -> bool:
        return self._is_held(node) or node.num_pins > 0

    def _is_held(self, node: Node) -> bool:
        return node.parent is None or node.num_locks > 0 or node.level != self._level


class SupersededStates(EvictionQueue):
    """Unlocked nodes whose states go without their text. Some that were superseded may not be any more."""

    def __init__(self, level: int) -> None:
        super().__init__(level, attrgetter("state_rank"))

    def pop_below(self, lowest: Node | None) -> Node | None:
        """Take out the node whose state ranks lowest, and lower than `lowest`, which goes first else; or None."""
        node = self.peek()
        if node is None or lowest is None or lowest.rank < node.state_rank:
            return None
        return self.pop()

    def _is_stale(self, node: Node) -> bool:
        return self._is_held(node) or not node.is_superseded  # a pin keeps the text, and the newest state behind it
