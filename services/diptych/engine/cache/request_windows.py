"""The pages that requests hold in layers with a window: in a table beside the page table, with the same rows.

A request has those from the first that is live on. The first of them may belong to the tree, which has them from who
computed the text before; the others are its own until it shares them.

While a prompt is computed it has as many as its next step needs, and what it will need is owed to it: until its windows
are full, and in place of what it will pass while others still see it. Nobody is admitted to that, so that of prompts
which are part-way the first can always go on.
"""

from __future__ import annotations

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.values.request import NO_PAGES, Request
from diptych.engine.values.window_pages import WindowPages
from diptych.kvtransfer.ownership import PagePool, Pages


class RequestWindows:
    """Pages of a request are `[num_pages, num_groups]`."""

    def __init__(self, windows: WindowPages, page_size: int, pool: PagePool, tree: RadixTree, page_table: I32) -> None:
        self._windows = windows
        self._page_size = page_size
        self._pool = pool
        self._tree = tree
        self._page_table = page_table
        by_group = np.zeros((windows.num_groups, *page_table.shape), dtype=np.int32)  # as steps take it
        self.table: I32 = by_group.transpose(1, 2, 0)  # [max_requests, max_pages, num_groups]
        self._part_way: dict[Request, None] = {}  # whose prompts will get more pages
        self.num_own = 0  # pages that are requests' own

    @property
    def num_owed(self) -> int:
        """Pages that prompts, which are part-way, will need."""
        return sum(self.owed(each, each.node, each.num_pages) for each in self._part_way if each.node is not None)

    def owed(self, request: Request, node: Node, num_pages: int) -> int:
        """Return how many pages a request of so many, which ends at `node` in the tree, will need while it is computed.

        What it has alone comes back to it.
        """
        alone = request.windows_end - request.first_own_window
        alone += self._tree.windows.num_seen_alone(node, request.first_window)
        missing = max(0, self._windows.most_computed(self._page_size) - alone)
        return self._windows.num_groups * min(num_pages - request.windows_end, missing)

    def num_held(self, request: Request) -> int:
        """Return how many pages a request holds."""
        return self._windows.num_groups * (request.windows_end - request.first_window)

    def own(self, request: Request) -> I32:
        """Return those that are the request's own."""
        return self.table[request.row, request.first_own_window : request.windows_end]

    def begin_import(self, request: Request, node: Node, num_pages: int) -> int:
        """Say what a request of so many pages holds that a peer computes; return how many pages it needs.

        They are all that is live behind it, and its own; `node` is locked.
        """
        first = self._windows.first_live(request.num_tokens, self._page_size)
        request.first_window, request.first_own_window, request.windows_end = first, first, num_pages
        request.windows_since = node.end
        return self._windows.num_groups * (num_pages - first)

    def begin(self, request: Request, node: Node, num_pages: int) -> int:
        """Say what a request of so many pages holds that is computed here; return how many pages of its own it needs.

        It sees what is live behind `node`, which is locked, and what is seen is locked, too.
        """
        first, own = self._tree.windows.first_live(node.end), node.end
        end = min(num_pages, own - (-self._windows.step_tokens // self._page_size))
        request.first_window, request.first_own_window, request.windows_end = first, own, end
        request.windows_since = self._tree.lock_windows(node, first)
        return self._windows.num_groups * (end - own)

    def fill(self, request: Request, pages: Pages) -> None:
        """Put pages of its own into the row of a request that has begun, behind those that it sees of the tree."""
        assert request.node is not None
        first, own = request.first_window, request.first_own_window
        if first < own:
            self.table[request.row, first:own] = self._tree.windows.live(request.node)
        self.table[request.row, own : request.windows_end] = pages.reshape(-1, self._windows.num_groups)
        self.num_own += pages.size
        self._fill_passed(request)
        if request.windows_end < request.num_pages:
            self._part_way[request] = None

    def append(self, request: Request, pages: I32) -> None:
        """Append pages of its own."""
        end = request.windows_end + len(pages)
        self.table[request.row, request.windows_end : end] = pages
        request.windows_end = end
        self.num_own += pages.size
        if end >= request.num_pages:
            self._part_way.pop(request, None)

    def pass_by(self, request: Request, num_tokens: int) -> Pages:
        """Give up what is behind all windows: every step that is not over computes tokens behind `num_tokens`.

        Return the request's own pages of it, which are to be released.
        """
        first, passed = self._windows.first_live(num_tokens, self._page_size), request.first_window
        if first <= passed:
            return NO_PAGES
        own: Pages = self.table[request.row, max(passed, request.first_own_window) : first].flatten()
        self.num_own -= own.size
        request.first_window, request.first_own_window = first, max(first, request.first_own_window)
        self._fill_passed(request)
        assert request.node is not None
        request.windows_since = self._tree.windows.unlock(request.node, request.windows_since, first)
        return own

    def share(self, request: Request, node: Node, num_tokens: int) -> Pages:
        """Hand over its pages up to `node`, which is locked, and see from there what is live behind `num_tokens`.

        Return those that the tree had already.
        """
        assert request.node is not None
        duplicate = self.hand_over(request, node)
        self._pool.release(self.pass_by(request, num_tokens))
        self._fill_passed(request)
        since = self._tree.lock_windows(node, request.first_window)
        self._tree.windows.unlock(request.node, request.windows_since, request.node.end)
        request.windows_since = since
        return duplicate

    def hand_over(self, request: Request, node: Node) -> Pages:
        """Give the tree the request's own pages up to the end of `node`; return those that it had already.

        None while the first that it holds was sent in part: it sees the rest of that page alone, and others would not.
        """
        first = request.first_own_window
        if request.first_window * self._page_size < request.windows_whole_from:
            return NO_PAGES
        rows = self.table[request.row, first : node.end].copy()
        if not rows.size:
            return NO_PAGES
        kept = self._tree.windows.keep(node, first, rows)
        self._pool.cache(rows[kept == rows])
        self.table[request.row, first : node.end] = kept
        self.num_own -= rows.size
        request.first_own_window = node.end
        duplicate: Pages = rows[kept != rows]
        return duplicate

    def unlock(self, request: Request, node: Node) -> None:
        """The request, whose node that is, or was to be, sees nothing of the tree any more."""
        self._tree.windows.unlock(node, request.windows_since, node.end)
        request.windows_since = node.end

    def end(self, request: Request) -> None:
        """The request holds nothing any more."""
        self.num_own -= self.own(request).size
        self.table[request.row] = 0
        self._part_way.pop(request, None)
        request.first_window = request.first_own_window = request.windows_end = request.windows_since = 0
        request.windows_whole_from = 0

    def _fill_passed(self, request: Request) -> None:
        """Let the places of what is behind the windows name a page of the request: it is read, and not looked at."""
        self.table[request.row, : request.first_window] = self._page_table[request.row, 0]
