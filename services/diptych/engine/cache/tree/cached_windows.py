"""The pages of layers with a window that a radix tree keeps beside its nodes' text.

A node has those of its last pages, as many as are left. Whoever goes on behind a text needs all that are live there, of
its last node and of nodes above it. They are locked apart from the text: a request that runs lets those behind its
windows go, and keeps the text.

What is given up first is *spare*: pages that are live behind no end of a text, be it the end of all that is cached or
where texts part. The rest goes with the text, or when nothing else is left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.cache.tier import POOL
from diptych.engine.cache.tree.radix_node import NO_PAGES, Node
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.ownership import Pages


class CachedWindows:
    """Knows every node with such pages in the pool, and counts them. Pages of a node are `[num_pages, num_groups]`."""

    def __init__(self, windows: WindowPages, page_size: int) -> None:
        self._windows = windows
        self._page_size = page_size
        self._nodes: dict[Node, None] = {}  # the oldest first
        self._maybe_spare: dict[Node, None] = {}  # what may have become so since it was looked at
        self.num_pages = 0
        self.num_evictable = 0  # pages of nodes that are not locked here

    @property
    def nodes(self) -> Collection[Node]:
        return self._nodes.keys()

    def first_live(self, end: int) -> int:
        """Return the first page that is live behind the first `end` pages of a text."""
        return self._windows.first_live(end * self._page_size, self._page_size)

    def longest_whole(self, path: Sequence[Node], end: int) -> int:
        """Return behind how many pages of a path, of its first `end`, all that is live is here.

        A text is left where nodes end, or where a chunk does, behind which nothing is live.
        """
        nodes = list(path)
        while not self.are_whole(nodes, end):
            start = nodes[-1].end - len(nodes[-1].pages)
            end = max(start, self._windows.last_boundary(end * self._page_size) // self._page_size)
            if end == start:
                nodes.pop()
        return end

    def are_whole(self, path: Sequence[Node], end: int) -> bool:
        """Return whether all that is live behind the first `end` pages is here; `path` ends with their last node."""
        first = self.first_live(end)
        for node in reversed(path if first < end else ()):
            start = node.end - len(node.pages)
            if node.end - node.num_window_pages > max(start, first):
                return False
            if start <= first:
                break
        return True

    def live(self, node: Node) -> I32:
        """Return the pages that are live behind `node`, which are here."""
        first = self.first_live(node.end)
        rows = [step.windows for step in node.path() if step.windows is not None and step.end > first]
        none = np.zeros((0, self._windows.num_groups), np.int32)
        return np.concatenate([none, *reversed(rows)])[max(0, first - node.end + sum(map(len, rows))) :]

    def between(self, path: Sequence[Node], first: int, end: int) -> I32:
        """Return the pages from page `first` of a text to its first `end` pages, which are all here, row by row."""
        rows = [np.zeros((0, self._windows.num_groups), np.int32)]
        for node in path:
            start = max(first, node.end - len(node.pages))
            if node.windows is not None and start < min(node.end, end):
                at = len(node.windows) - node.end
                rows.append(node.windows[start + at : min(node.end, end) + at])
        return np.concatenate(rows)

    def keep(self, node: Node, first: int, rows: I32) -> I32:
        """Add `rows`, the pages from page `first` of the text to the end of `node`, where there are none yet.

        Return those that are here now.
        """
        kept = rows.copy()
        for step in node.path():
            if step.end <= first:
                break
            start = max(first, step.end - len(step.pages))
            given = rows[start - first : step.end - first]
            num_here = min(step.num_window_pages, len(given))
            if step.windows is not None and num_here:
                kept[step.end - num_here - first : step.end - first] = step.windows[-num_here:]
            self._prepend(step, given[: len(given) - num_here])
        return kept

    def lock(self, node: Node, first: int) -> int:
        """Keep what the path to `node` has behind its first `first` pages; locks are counted.

        Return where the first node that is locked begins: `unlock` is to be told.
        """
        since = node.end
        for step in node.path():
            if step.end <= first:
                break
            self.lock_node(step)
            since = step.end - len(step.pages)
        return since

    def unlock(self, node: Node, since: int, first: int) -> int:
        """Let go of the nodes locked `since` a page that end at page `first` or before it. Return what is left."""
        left = since
        for step in node.path():
            if step.end <= since:
                break
            if step.end <= first:
                left = max(left, step.end)
                self.unlock_node(step)
        return left

    def num_seen_alone(self, node: Node, first: int) -> int:
        """Return how many pages from page `first` to the end of `node` only one has locked here."""
        num_pages = 0
        for step in node.path():
            if step.end <= first:
                break
            if step.num_window_locks == 1:
                num_pages += step.end - max(first, step.end - len(step.pages))
        return num_pages

    def lock_node(self, node: Node) -> None:
        if node.num_window_locks == 0:
            self.num_evictable -= self._count(node)
        node.num_window_locks += 1

    def unlock_node(self, node: Node) -> None:
        node.num_window_locks -= 1
        if node.num_window_locks == 0:
            self.num_evictable += self._count(node)
            self._look_at(node)

    def enter(self, node: Node) -> None:
        """What `node` has has come to the pool with its text."""
        if node.windows is not None:
            self._nodes[node] = None
            self.num_pages += node.windows.size
            self.num_evictable += 0 if node.num_window_locks else node.windows.size
            self._look_at(node)

    def leave(self, node: Node) -> None:
        """What `node` has, which nobody has locked here, goes with its text."""
        if node.windows is not None:
            windows = node.windows
            self.pop(node)
            node.windows = windows

    def on_split(self, upper: Node, lower: Node) -> None:
        """A node was split: both halves have what was theirs."""
        for half in (upper, lower):
            self._nodes.pop(half, None)
            if half.windows is not None and half.level == POOL:
                self._nodes[half] = None
            self._look_at(half)

    def on_end_moved(self, node: Node) -> None:
        """A text goes on behind `node` that did not, or does not any more."""
        distance = 0
        for step in node.path() if self._nodes else ():
            self._look_at(step)
            distance += len(step.pages)
            if distance * self._page_size > self._windows.window:
                break

    def pop_spare(self, num_pages: int) -> Pages:
        """Take out about so many pages, and no fewer if there are so many, that are live behind no end of a text."""
        if not self._maybe_spare:
            return NO_PAGES
        gone: list[Pages] = []
        while num_pages > 0 and self._maybe_spare:
            node = next(iter(self._maybe_spare))
            num_rows = min(self._num_spare(node), -(-num_pages // self._windows.num_groups))
            if num_rows == 0:
                del self._maybe_spare[node]
                continue
            gone.append(self._cut(node, num_rows))
            num_pages -= len(gone[-1])
        return np.concatenate([NO_PAGES, *gone])

    def pop(self, node: Node) -> Pages:
        """Take out all that `node` has, which nobody has locked here."""
        self._maybe_spare.pop(node, None)
        return self._cut(node, node.num_window_pages)

    def first(self) -> Node | None:
        """Return a node whose pages can go; None when there is none."""
        return next((node for node in self._nodes if not node.num_window_locks), None)

    def _num_spare(self, node: Node) -> int:
        """Return how many of a node's first pages are live behind no end of a text."""
        if node.num_window_locks or node.windows is None or node.level != POOL:
            return 0
        end_node = node
        while len(end_node.children) == 1:
            (end_node,) = end_node.children.values()
            if self.first_live(end_node.end) >= node.end:
                return node.num_window_pages
        first = node.end - node.num_window_pages
        return min(node.num_window_pages, max(0, self.first_live(end_node.end) - first))

    def _prepend(self, node: Node, rows: I32) -> None:
        if not len(rows):
            return
        node.windows = rows.copy() if node.windows is None else np.concatenate([rows, node.windows])
        self._nodes[node] = None
        self.num_pages += rows.size
        self.num_evictable += 0 if node.num_window_locks else rows.size
        self._look_at(node)

    def _cut(self, node: Node, num_rows: int) -> Pages:
        """Take the first rows out of a node that is not locked."""
        if node.windows is None:
            return NO_PAGES
        gone, left = node.windows[:num_rows], node.windows[num_rows:]
        node.windows = left if len(left) else None
        if node.windows is None:
            self._nodes.pop(node, None)
        self.num_pages -= gone.size
        self.num_evictable -= gone.size
        return gone.ravel()

    def _look_at(self, node: Node) -> None:
        if node.windows is not None and node.level == POOL:
            self._maybe_spare[node] = None

    @staticmethod
    def _count(node: Node) -> int:
        return 0 if node.windows is None or node.level != POOL else node.windows.size
