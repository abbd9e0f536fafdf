"""In which order texts with states go while pages are evicted: what is least likely to be wanted again first.

What a text promises changes with time, so no queue can keep that order from one eviction to the next. But within one no
time passes: all are looked at once, and however many texts go then, each costs O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from itertools import count
from typing import Final

from diptych.engine.cache.tier import POOL
from diptych.engine.cache.tree.radix_node import Node

MAX_SEEN: Final = 4096  # states that are looked at; of more, equal steps through them: the least of these is low enough


class Departures:
    """Those of one eviction. `promise`: what a text is expected to save, which is asked for when it is first needed."""

    def __init__(self, nodes: Collection[Node], promise: Callable[[Node], float], num_before: int) -> None:
        self._nodes, self._promise, self._num_before = nodes, promise, num_before
        self._places: dict[Node, int] = {}  # where promises are the same, the older state goes
        self._numbers = count(1)  # of later entries: nodes have no order
        self._heap: list[tuple[float, int, int, Node]] | None = None

    def pop(self, lowest: Node) -> Node:
        """Return the text that goes next, which is `lowest` if no other promises less."""
        if self._heap is None:
            seen, promise_of = self._seen(), self._promise
            self._places = dict(zip(seen, count(), strict=False))
            self._heap = [(promise_of(node), place, 0, node) for place, node in enumerate(seen) if is_end(node)]
            heapq.heapify(self._heap)
        else:
            self.add(lowest)
        while self._heap:
            promise, _, _, node = heapq.heappop(self._heap)
            if node.state is None or not is_end(node):
                continue
            if (entry := self._entry(node))[0] <= promise:
                return node
            heapq.heappush(self._heap, entry)
        return lowest

    def add(self, node: Node) -> None:
        """A text may go now that could not before, as others were behind it."""
        if self._heap is not None and node.state is not None:
            heapq.heappush(self._heap, self._entry(node))

    def _entry(self, node: Node) -> tuple[float, int, int, Node]:
        return self._promise(node), self._places.get(node, 0), next(self._numbers), node

    def _seen(self) -> list[Node]:
        nodes = list(self._nodes)
        step = -(-len(nodes) // MAX_SEEN) or 1
        return nodes[self._num_before % step :: step]


def is_end(node: Node) -> bool:
    """Whether the text up to this node could go, as others are not behind it."""
    if node.level != POOL or node.num_locks or node.num_pins or node.parent is None:
        return False
    return not (node.children and any([child.level == POOL for child in node.children.values()]))
