"""Decides which cached page goes first: the order of the unlocked nodes of a radix tree.

A node's rank is (score, time of its last touch, minus its end). The score is the strategy: LRU scores all alike; LFU
counts uses, and ages: a touched node's score starts from that of the node evicted last, so what was popular once does
not stay for ever (LFU with dynamic aging: Arlitt et al., "Evaluating content management techniques for Web proxy
caches", 2000).
A path is touched from its deep end to the root, and of two halves of a node the deeper ranks lower; hence no node
outranks its parent, and the lowest is a leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Final, Literal

from diptych.engine.cache.radix_node import Node, Rank

EvictionPolicy = Literal["lru", "lfu"]
Score = Callable[[int, int], int]  # (uses of the node, score of the node evicted last) -> score


def lru(num_uses: int, age: int) -> int:
    return 0


def lfu(num_uses: int, age: int) -> int:
    return num_uses + age


SCORES: Final[Mapping[EvictionPolicy, Score]] = {"lru": lru, "lfu": lfu}


class Ranking:
    """Gives nodes their ranks, which only rise."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._score = SCORES[policy]
        self._age = 0
        self._clock = 0

    def touch(self, node: Node) -> None:
        self._clock += 1
        node.rank = (self._score(node.num_uses, self._age), self._clock, -node.end)

    def note_eviction(self, node: Node) -> None:
        self._age = node.rank[0]


class EvictionQueue:
    """The unlocked nodes of one level. All operations are O(log n), amortised.

    Lazy: an entry keeps the rank it came with, and moves or goes when it gets to the front. That is enough because
    ranks only rise.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self._heap: list[tuple[Rank, Node]] = []
        self._members: set[Node] = set()  # that have an entry

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def add(self, node: Node) -> None:
        """Let an unlocked node be evicted."""
        if node not in self._members:
            self._members.add(node)
            heapq.heappush(self._heap, (node.rank, node))

    def pop(self) -> Node | None:
        """Take out the unlocked node of the lowest rank; None when there is none."""
        while self._heap:
            rank, node = self._heap[0]
            if self._is_stale(node) or rank == node.rank:
                heapq.heappop(self._heap)
                self._members.remove(node)
                if not self._is_stale(node):
                    return node
            else:
                heapq.heapreplace(self._heap, (node.rank, node))
        return None

    def _is_stale(self, node: Node) -> bool:
        return node.parent is None or node.num_locks > 0 or node.level != self._level
