"""The way of cached pages between the prefix caches of two workers: what arrives from a peer, and what is lent to one.

What arrives is no part of the tree before it is verified: so nobody finds a page that may still be written, or whose
bytes are not those that were sent. The part of the prefix that is here already is locked meanwhile, for the rest is put
behind it. What is lent is locked and pinned: it is neither evicted nor freed while a transfer reads it.

Where layers have windows, a prefix comes with all that the next token sees there, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tree.radix_node import Node
from diptych.kvtransfer.ownership import Pages


@dataclass(frozen=True, slots=True, eq=False)
class Arriving:
    """A prefix of which a peer writes what is behind `node`."""

    tokens: I64  # of all of it: whole pages
    extra_key: bytes
    node: Node  # what is here of it ends there; locked
    first_page: int  # that is not here
    pages: Pages  # for the tokens behind it, and behind those for windows, page by page
    num_uses: int = 0  # of the text elsewhere


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """What a peer gets of a prefix. Locked and pinned."""

    node: Node  # the prefix ends there
    num_pages: int  # of tokens
    pages: Pages  # those, and behind them the ones of windows, page by page
    windows_since: int  # where those begin that are locked


class PeerPages:
    """Pages of one cache that come from other caches, or go there."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def num_beside(self, end_page: int) -> int:
        """Return how many pages of windows are seen behind a prefix of so many pages."""
        size, windows = self._cache.page_size, self._cache.windows
        return windows.num_live(end_page * size, size) if windows.num_groups else 0

    # from a peer

    def has_room_below(self, num_pages: int, num_uses: int, idle_s: float) -> bool:
        """Whether so many pages are free, or have what goes before a text that was used so often, so long ago."""
        missing = num_pages - self._cache.pool.num_free
        return missing <= 0 or self._cache.tree.num_evictable_below(num_uses, idle_s) >= missing

    def expect(self, tokens: I64, extra_key: bytes, spare_pages: int, num_uses: int = 0) -> Arriving | None:
        """Grant pages for what is not here of a prefix of whole pages.

        None, and nothing changed, unless `spare_pages` would stay available; nor is there more to be had of a prefix
        of which a tier has some.
        """
        cache = self._cache
        match = cache.tree.match(tokens, extra_key)
        first, end = len(match.pages), len(tokens) // cache.page_size
        if match.restore is not None or match.lower_nodes or first >= end:
            return None
        cache.tree.lock(match.node)
        count = end - first + self.num_beside(end)
        if count + spare_pages > cache.num_available:
            cache.tree.unlock(match.node)
            return None
        return Arriving(tokens, extra_key, match.node, first, cache.take_for_peer(count), num_uses)

    def accept(self, arriving: Arriving, num_pages: int, caller: int = 0) -> None:
        """The first pages of tokens are here and verified, with what is seen behind them. No write comes any more.

        `caller`: the room of a request that has called a tool, if this is its text; any other number changes nothing.
        """
        cache, first = self._cache, arriving.first_page
        num_tokens = (first + num_pages) * cache.page_size
        text, beside = np.split(arriving.pages, [len(arriving.tokens) // cache.page_size - first])
        cache.pool.finish_import(arriving.pages)
        node, tokens = arriving.node, arriving.tokens[:num_tokens]
        insertion = cache.tree.extend(node, tokens, text[:num_pages], arriving.extra_key)
        cache.pool.cache(insertion.adopted)
        known = len(insertion.known)
        unused = [text[:known], text[known + len(insertion.adopted) :]]
        insertion.node.num_uses = max(insertion.node.num_uses, arriving.num_uses)
        cache.tree.lock(insertion.node)
        unused.append(self._keep_windows(insertion.node, first + num_pages, beside))
        cache.tree.unlock(insertion.node)
        cache.sessions.extended(insertion.node, caller)
        cache.tree.unlock(node)
        cache.pool.release(np.concatenate(unused))
        cache.sweep()

    def refuse(self, arriving: Arriving) -> None:
        """Nothing of it is of use, and no write comes any more."""
        self._cache.pool.finish_import(arriving.pages)
        self._cache.pool.release(arriving.pages)
        self._let_go(arriving.node)

    def quarantine(self, arriving: Arriving) -> None:
        """Nobody waits for it any more, and the peer may still write."""
        self._cache.pool.quarantine(arriving.pages)
        self._let_go(arriving.node)

    def release(self, arriving: Arriving) -> None:
        """The peer will not write any more into what is in quarantine."""
        self._cache.pool.release_quarantine(arriving.pages)

    def _keep_windows(self, node: Node, end_page: int, beside: Pages) -> Pages:
        """Give the tree what is seen behind a locked node, if the prefix ends there; return what it has no use for."""
        cache = self._cache
        if not cache.windows.num_groups or node.end != end_page:
            return beside
        rows = beside[: self.num_beside(end_page)].reshape(-1, cache.windows.num_groups)
        kept = cache.tree.windows.keep(node, end_page - len(rows), rows)
        cache.pool.cache(rows[kept == rows])
        return np.concatenate([rows[kept != rows], beside[rows.size :]])

    # to a peer

    def lend(self, tokens: I64, extra_key: bytes, first_page: int) -> Lent | None:
        """Lock and pin what is in the pool of a prefix, from a page on; None: nothing is."""
        cache = self._cache
        find = cache.tree.match_windows if cache.windows.num_groups else cache.tree.match
        match = find(tokens, extra_key)
        if len(match.pages) <= first_page or (cache.windows.num_groups and len(match.pages) < match.node.end):
            return None
        node = match.node
        while node.end > len(match.pages):  # what is in a tier, or comes from one, is not lent
            assert node.parent is not None
            node = node.parent
        since = node.end
        cache.tree.lock(node)
        rows = match.pages[:0]
        if cache.windows.num_groups:
            since = cache.tree.lock_windows(node, cache.tree.windows.first_live(node.end))
            rows = cache.tree.windows.live(node).ravel()
        pages = np.concatenate([match.pages[first_page:], rows])
        cache.pool.pin(pages)
        return Lent(node, len(match.pages) - first_page, pages, since)

    def take_back(self, lent: Lent) -> None:
        """No transfer reads it any more."""
        self._cache.pool.unpin(lent.pages)
        if self._cache.windows.num_groups:
            self._cache.tree.windows.unlock(lent.node, lent.windows_since, lent.node.end)
        self._let_go(lent.node)

    def _let_go(self, node: Node) -> None:
        self._cache.tree.unlock(node)
        self._cache.sweep()
