"""Texts that are kept although nobody holds them, as their sessions are expected back, and who gives way.

A pin keeps the path to a node out of the order of eviction until its time is over. It is no lock: pinned pages count as
available, so no request ever waits for them. When nothing else is left to be evicted, or all pins take more than
their share, those go first whose sessions are least likely to be back soon, to a factor of two; and of equals the
youngest job's. So of more jobs than fit, some go on from their cached text instead of all computing theirs anew, and
they are those that will end first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from diptych.engine.cache.return_times import ReturnTimes, ToolKey
from diptych.engine.cache.tree.radix_node import Node

MAX_PINS: Final = 2048


class Pin(NamedTuple):
    """Why the path to a node is kept."""

    key: ToolKey | None  # the tool that its session waits for; None: it is back, and waits for its turn
    since_s: float  # when it began to wait
    job_since_s: float  # when the job began that it is of
    until_s: float


class Pins:
    """Knows the nodes that end a pinned text, and counts the pages of all."""

    def __init__(self, most_pages: int, times: ReturnTimes) -> None:
        """`most_pages` of the pool are pinned at one time."""
        self.most_pages = most_pages
        self.num_pages = 0
        self.num_given_up = 0  # for lack of memory, since start
        self._times = times
        self._pins: dict[Node, Pin] = {}
        self._next_s = math.inf  # nothing ends before

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, node: Node) -> bool:
        return node in self._pins

    def get(self, node: Node) -> Pin | None:
        return self._pins.get(node)

    def put(self, node: Node, pin: Pin) -> None:
        """Keep the path to a node of the pool; a node that has a pin gets this one instead."""
        if node not in self._pins:
            for step in node.path():
                step.num_pins += 1
                self.num_pages += step.num_pool_pages if step.num_pins == 1 else 0
        self._pins[node] = pin
        self._next_s = min(self._next_s, pin.until_s)

    def drop(self, node: Node) -> list[Node]:
        """Keep a text no longer; return the nodes that no pin keeps any more, the deepest first."""
        if self._pins.pop(node, None) is None:
            return []
        freed = []
        for step in node.path():
            step.num_pins -= 1
            if not step.num_pins:
                self.num_pages -= step.num_pool_pages
                freed.append(step)
        return freed

    def surplus(self, now_s: float) -> Iterator[Node]:
        """Yield whose pins are to be dropped, one after the other, until they take no more than their share."""
        while self.num_pages > self.most_pages or len(self._pins) > MAX_PINS:
            yield self.first_to_go(now_s)

    def over(self, now_s: float) -> list[Node]:
        """Return those whose time is over."""
        if now_s < self._next_s:
            return []
        self._next_s = min((pin.until_s for pin in self._pins.values() if pin.until_s > now_s), default=math.inf)
        return [node for node, pin in self._pins.items() if pin.until_s <= now_s]

    def first_to_go(self, now_s: float) -> Node:
        """Return whose pin goes for lack of memory; there is one at least."""
        self.num_given_up += 1
        return min(self._pins, key=lambda node: self._worth(self._pins[node], now_s))

    def _worth(self, pin: Pin, now_s: float) -> tuple[float, float]:
        if pin.key is None:
            return math.inf, -pin.job_since_s
        index = self._times.index(pin.key, now_s - pin.since_s)
        return math.floor(math.log2(index)) if index > 0 else -math.inf, -pin.job_since_s
