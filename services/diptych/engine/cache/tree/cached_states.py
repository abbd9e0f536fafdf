"""The states of recurrent layers that a radix tree keeps behind its nodes' text: who reads them, and which goes first.

A state goes with the text that it stands behind. Where that is locked, it is still given up when nothing else is left,
unless a request is about to begin with it: so a text that is in use keeps no more than its own pages from others.
"""

from __future__ import annotations

from collections.abc import Collection

from diptych.engine.cache.tree.radix_node import NO_PAGES, Node
from diptych.kvtransfer.ownership import Pages


class CachedStates:
    """Knows every node with a state in the pool, and counts their pages."""

    def __init__(self) -> None:
        self._nodes: dict[Node, None] = {}  # the oldest state first
        self.num_pages = 0
        self.num_evictable = 0  # pages of those that nobody reads

    @property
    def nodes(self) -> Collection[Node]:
        return self._nodes.keys()

    def keep(self, node: Node, pages: Pages) -> None:
        """Add the state after the last token of `node`, which has none."""
        node.state = pages
        self._nodes[node] = None
        self.num_pages += len(pages)
        self.num_evictable += len(pages)

    def enter(self, node: Node) -> None:
        """The state of `node`, if it has one, has come to the pool with its text."""
        if node.state is not None:
            self.keep(node, node.state)

    def leave(self, node: Node) -> None:
        """The state of `node`, which nobody reads, goes with its text."""
        if node.state is not None:
            state = self.pop(node)
            node.state = state

    def begin_reading(self, node: Node) -> None:
        """Keep the state of `node`, which is locked, until the reader has ended. Readers are counted."""
        assert node.state is not None
        if node.num_readers == 0:
            self.num_evictable -= len(node.state)
        node.num_readers += 1

    def end_reading(self, node: Node) -> None:
        assert node.state is not None
        node.num_readers -= 1
        if node.num_readers == 0:
            self.num_evictable += len(node.state)

    def num_unread(self, node: Node) -> int:
        """Return how many pages fewer can be evicted once somebody reads the state of `node`, if it has one."""
        return 0 if node.state is None or node.num_readers else len(node.state)

    def first(self) -> Node | None:
        """Return the node whose state goes first; None when all are read."""
        return next((node for node in self._nodes if not node.num_readers), None)

    def pop(self, node: Node) -> Pages:
        """Take out the state of `node`, which nobody reads; no pages if it has none."""
        pages = NO_PAGES if node.state is None else node.state
        node.state = None
        self._nodes.pop(node, None)
        self.num_pages -= len(pages)
        self.num_evictable -= len(pages)
        return pages
