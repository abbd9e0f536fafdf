"""The KV memory of one scheduler: page pool, radix tree and page table moved together, by the request.

Three levels, as in the field: request -> pages (`page_table`), page ownership (`PagePool`), cached prefixes
(`RadixTree`). This is the only place that takes pages for a request and the only place that gives them back, so
every page has one owner and one release path. Knows bookkeeping only; the bytes live in the transfer engine's pool.

A request's first pages, up to the end of its node, belong to the tree: what was cached when it was admitted, and what
it has shared since. Others read these while it runs.

With tiers, what is evicted goes down to the first of them, and comes back when a prompt matches it. So a request that
is retired early (retracted) and admitted again finds its KV, wherever that has gone meanwhile. What a tier does not
bring back at once is a `Restore`: the cache holds its pages, and the request waits without any.

Where layers have windows, a request holds other pages beside these, as many as are live: see `WindowPages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from diptych.common.arrays import I32, I64
from diptych.engine.cache.beside import Beside
from diptych.engine.cache.cache_changes import NO_CHANGES, CacheChanges
from diptych.engine.cache.request_windows import RequestWindows
from diptych.engine.cache.return_times import ReturnTimes
from diptych.engine.cache.sessions import Sessions
from diptych.engine.cache.shared_tiers import ComputeSeconds, SharedTiers
from diptych.engine.cache.snapshots import cuts
from diptych.engine.cache.tier import POOL, Store, Tier
from diptych.engine.cache.tier_moves import TierMoves
from diptych.engine.cache.tree.pins import Pins
from diptych.engine.cache.tree.radix import ALL_LEVELS, RadixTree
from diptych.engine.cache.tree.radix_node import Insertion, Match, Node
from diptych.engine.cache.turns import UNKNOWN
from diptych.engine.cache.worth_loading import TierPrices
from diptych.engine.values.core_report import CacheReport, Holders, TierPrice, TierReport
from diptych.engine.values.policy_names import EvictionPolicy
from diptych.engine.values.request import NO_PAGES, Request, Snapshot, page_names
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.kvtransfer.notes import HandedGroup
from diptych.kvtransfer.ownership import PagePool, Pages

POOL_NAME: Final = "pool"
RELOAD_SHARE: Final = 0.1  # what a page costs at most that comes back from a tier, beside one that is computed
NUM_STATES: Final = 2  # that a request needs at most at one time: one to begin with, and one to be handed over


def never_computed(start: int, end: int) -> float:
    """Return what computing takes of which nothing is known: whatever is loaded comes sooner."""
    return math.inf


def no_spare(request: Request) -> int:
    """A request may have all that there is."""
    return 0


@dataclass(slots=True)
class CacheCounts:
    """What was found of prompts that are computed here, since the start. Lists are by level: the pool, then tiers."""

    found_tokens: list[int]
    not_loaded: list[int]  # pages that were sooner computed by requests which were admitted
    saved_s: list[float]  # of computing, by restores that took their time, as predicted
    prompt_tokens: int = 0  # of which those are


def counts_of(num_levels: int) -> CacheCounts:
    return CacheCounts([0] * num_levels, [0] * num_levels, [0.0] * num_levels)


class KvCache:
    """Grants pages to requests and keeps finished prefixes for reuse."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_requests: int,
        max_tokens_per_request: int,
        eviction_policy: EvictionPolicy = "lru",
        tiers: Sequence[Tier] = (),
        changes: CacheChanges = NO_CHANGES,
        pages_per_state: int = 0,
        windows: WindowPages = NO_WINDOWS,
        pin_share: float = 0.0,
        store: Store | None = None,
    ) -> None:
        """`pages_per_state`: of recurrent layers; 0: there are none. `pin_share`: of the pool, see `sessions`.

        `store`: below all tiers.
        """
        reload_share = RELOAD_SHARE if tiers else 1.0
        tiers = tiers if store is None else (*tiers, store)
        self.page_size = page_size
        self.made_by = ""  # what its KV is made by, and its form: caches that say the same may share pages
        self.changes = changes  # of the set of cached pages
        self.pool = PagePool(num_pages)
        times = ReturnTimes()
        self.tree = RadixTree(
            page_size,
            policy=eviction_policy,
            tiers=tiers,
            changes=changes,
            windows=windows,
            pins=Pins(int(pin_share * self.pool.capacity), times),
        )
        self.sessions = Sessions(self.tree, times, page_size, is_on=pin_share > 0, reload_share=reload_share)
        self.counts = counts_of(1 + len(tiers))
        self.moves = TierMoves(self.tree, self.pool, tiers, page_size)
        self.compute_s: ComputeSeconds = never_computed
        self._tiers = tiers
        self._prices = TierPrices(tiers, page_size)
        self.has_tiers = bool(tiers)
        self._duplicates: list[Pages] = []  # of shared pages, still read by steps or transfers
        self.pages_per_state = pages_per_state
        self.windows = windows
        self._begins_anywhere = not (windows.num_groups or pages_per_state)  # behind any text, with nothing beside
        beside = Beside(windows, pages_per_state, page_size)
        self._lower = SharedTiers(self.tree, tiers, store, page_size, beside, self._make_room)
        fitting = windows.fitting(self.pool.capacity - NUM_STATES * pages_per_state, page_size)
        width = min(self.pages_for(max_tokens_per_request), fitting)
        self.page_table: I32 = np.zeros((max_requests, width), dtype=np.int32)
        self._windows = RequestWindows(windows, page_size, self.pool, self.tree, self.page_table)
        self._free_rows = list(range(max_requests - 1, -1, -1))

    @property
    def max_request_tokens(self) -> int:
        """The longest request (prompt and output) that fits when it is alone."""
        width: int = self.page_table.shape[1]
        return width * self.page_size

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free, or cached and unlocked."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_window_pages_held(self) -> int:
        """Pages that a request could not get now because others see them in layers with a window."""
        return self._windows.num_own + self.tree.windows.num_pages - self.tree.windows.num_evictable

    @property
    def num_beside_next(self) -> int:
        """How many of the pages that a request could get now its windows and its state would take."""
        if not (self.windows.num_groups or self.pages_per_state):
            return 0
        left = max(0, self.num_available - self.pages_per_state)
        return self.num_available - self.windows.fitting(left, self.page_size)

    @property
    def is_held(self) -> bool:
        """Whether a tier writes pages or a request holds some, be it one that has ended and is in a step that runs."""
        return len(self._free_rows) < self.num_rows or len(self.moves) > 0

    @property
    def num_rows(self) -> int:
        """Requests that can be admitted at once, as far as rows of the page table go."""
        return len(self.page_table)

    @property
    def has_row(self) -> bool:
        """Whether one more request could be admitted, as far as rows of the page table go."""
        return bool(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def pages_for_prompt(self, num_tokens: int) -> int:
        """Return what a prompt of so many tokens needs at most: pages of its own, and states."""
        return self.windows.pool_pages(self.pages_for(num_tokens), self.page_size) + NUM_STATES * self.pages_per_state

    @property
    def most_beside(self) -> int:
        """Return how many of them a prompt takes at most that a peer computes."""
        return self.pages_per_state + self.windows.most_live(self.page_size)

    def handed(self, request: Request, given_len: int, page_size: int) -> tuple[HandedGroup, ...]:
        """Return what is handed over of a prompt to pages of such a size where `given_len` tokens are there already."""
        num_tokens = request.prompt_len
        num_pages = -(-num_tokens // page_size) - given_len // page_size
        groups = [HandedGroup("tokens", given_len, num_tokens, num_pages)]
        if self.windows.num_groups:
            starts = [self.windows.first_live(num_tokens, size) * size for size in (page_size, self.page_size)]
            first = max(*starts, request.windows_whole_from)
            groups.append(HandedGroup("window", first, num_tokens, self.windows.num_live(num_tokens, page_size)))
        if self.pages_per_state:
            groups.append(HandedGroup("state", num_tokens, num_tokens, self.pages_per_state))
        return tuple(groups)

    def pages_of(self, request: Request) -> Pages:
        """The request's pages in order; those up to the end of its node belong to the tree."""
        return self.page_table[request.row, : request.num_pages]

    def owned_pages(self, request: Request) -> Pages:
        """Return the request's own pages in the order in which they are granted: those of windows group by group."""
        assert request.node is not None
        pages = self.pages_of(request)[request.node.end :]
        if self.windows.num_groups:
            return np.concatenate([pages, self._windows.own(request).ravel("F")])
        return np.concatenate([pages, *(each.pages for each in request.snapshots)]) if request.snapshots else pages

    def cached_len(self, request: Request) -> int:
        """How many tokens of the request need not be computed now, in all levels. Counts as no use."""
        tokens, extra_key = self._matchable(request), request.extra_key
        request.found, num_tokens = self.tree.reach(tokens, extra_key, request.found)
        if self._begins_anywhere:
            return num_tokens
        if self.begins_with_state(request):
            return self.tree.peek_state(tokens, extra_key, request.found)
        if self.begins_with_windows(request):
            return self.tree.peek_windows(tokens, extra_key, request.found)
        return num_tokens

    def admit(self, request: Request, *, spare_pages: Callable[[Request], int] = no_spare, spare_rows: int = 0) -> bool:
        """Match and lock the longest cached prefix and take pages for all its tokens.

        False, and nothing changed, unless `spare_pages(request)` and `spare_rows` would stay available as well: it is
        asked where the request itself fits. False also while a store is asked for it, or some of it is on its way back
        from a tier: `request.restore` is what to wait for.
        """
        request.restore = None
        if len(self._free_rows) <= spare_rows:
            return False
        request.restore = self._lower.look_up(request, self.compute_s)
        if request.restore is not None:
            return False
        match, not_loaded = self._match(request)
        if match.restore is not None:
            request.restore = match.restore
            return False
        self.tree.lock(match.node)
        num_state_pages = self.pages_per_state if request.state_len else 0
        num_window_pages, num_owed = self._begin_windows(request, match.node) if self.windows.num_groups else (0, 0)
        num_lower_places = sum([node.num_places for node in match.lower_nodes]) if match.lower_nodes else 0
        num_pages = self.pages_for(request.num_tokens) - len(match.pages) - match.num_lower_pages
        need = num_lower_places + num_pages + num_window_pages + num_state_pages
        num_kept = self._num_unread(request, match.node) if self.pages_per_state else 0
        num_left = self.num_available - need - num_kept - num_owed
        if num_left < 0 or num_left < spare_pages(request):
            self._unlock(request, match.node)
            return False
        if self.pages_per_state and not match.lower_nodes:
            self._begin_reading(request, match)
        pages = self._allocate(need)
        if match.lower_nodes:
            request.restore = self.moves.restore(request, match, pages, self.compute_s)
        if request.restore is not None:
            self._unlock(request, match.node)
            return False
        pages = pages[num_lower_places:]
        self._fill_row(request, match, pages[:num_pages])
        for level, num_pages_there in not_loaded:
            self.counts.not_loaded[level] += num_pages_there
        self.sessions.waits_no_more(request)
        if self.windows.num_groups:
            self._windows.fill(request, pages[num_pages : num_pages + num_window_pages])
        if self.pages_per_state:
            self._begin_state(request, match, pages[num_pages + num_window_pages :])
        return True

    def finish_restore(self, number: int, error: str | None) -> None:
        """A tier has brought pages back, or can't: then they are forgotten, and whoever wants them computes them."""
        restore = self.moves.finish(number, error)
        if not restore.has_failed:
            self.counts.saved_s[restore.level] += restore.saved_s
        self.sweep()

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens; False, and nothing changed, when there are no pages."""
        num_pages = self.pages_for(num_tokens) - request.num_pages
        need = num_pages * (1 + self.windows.num_groups)
        if need <= 0:
            return True
        if need > self.num_available:
            return False
        pages = self._allocate(need).reshape(num_pages, -1)
        self._append(request, pages[:, 0])
        self._windows.append(request, pages[:, 1:])
        return True

    def grow_each(self, requests: Sequence[Request], spare: int = 0) -> bool:
        """Give each request one more page; False, and nothing changed, when `spare` more could not get one then."""
        num_beside = 1 + self.windows.num_groups
        need = len(requests) * num_beside
        if need + spare * num_beside > self.num_available:
            return False
        if requests:
            pages = self._allocate(need).reshape(len(requests), -1)
            for request, page in zip(requests, pages[:, 0].tolist(), strict=True):
                self.page_table[request.row, request.num_pages] = page
                request.num_pages += 1
        if requests and self.windows.num_groups:
            for request, beside in zip(requests, pages[:, None, 1:], strict=True):
                self._windows.append(request, beside)
        return True

    def grow_all(self, requests: Sequence[Request]) -> None:
        """Make room for the tokens of each that are computed. There are no windows, and there are pages enough."""
        counts = [self.pages_for(request.computed_len) - request.num_pages for request in requests]
        if counts:
            pages, start = self._allocate(sum(counts)), 0
            for request, count in zip(requests, counts, strict=True):
                self._append(request, pages[start : start + count])
                start += count

    @property
    def window_table(self) -> I32:
        """`[max_requests, max_pages, num_groups]`: as `page_table`, of layers with a window."""
        return self._windows.table

    @property
    def num_owed(self) -> int:
        """Pages that prompts, which are part-way, will need in layers with a window."""
        return self._windows.num_owed

    def num_window_pages(self, request: Request) -> int:
        """Return how many pages a request holds in layers with a window."""
        return self._windows.num_held(request)

    def grow_windows(self, request: Request, num_tokens: int) -> bool:
        """Make room for its first `num_tokens` tokens in layers with a window, too; False if there is not enough."""
        num_pages = self.pages_for(num_tokens) - request.windows_end
        need = num_pages * self.windows.num_groups
        if need <= 0:
            return True
        if need > self.num_available:
            return False
        self._windows.append(request, self._allocate(need).reshape(num_pages, -1))
        return True

    def pass_windows(self, requests: Sequence[Request]) -> None:
        """Give up what is behind all windows: every step that is not over computes tokens behind those of a request.

        All at once: to release a page alone costs about as much as to release hundreds.
        """
        if requests:
            self.pool.release(np.concatenate([self._windows.pass_by(each, each.num_tokens) for each in requests]))

    def share(self, request: Request, num_tokens: int) -> Pages:
        """Let others read the whole pages of the request's first `num_tokens` tokens, whose KV is in them.

        Where the tree has pages of others for these tokens, the request reads those from now on. Returns its own, which
        are in no row any more: to be given to `release_duplicates` when no launched step and no transfer reads them.
        """
        assert request.node is not None
        self._end_reading(request)
        start = request.node.end
        insertion = self._hand_over(request, num_tokens)
        if len(insertion.known):
            self.page_table[request.row, start : insertion.node.end] = insertion.pages
        if request.snapshots:
            self._keep_snapshots(request, insertion.node, num_tokens)
        duplicate = insertion.duplicate
        self.tree.lock(insertion.node)
        if self.windows.num_groups:
            duplicate = np.concatenate([duplicate, self._windows.share(request, insertion.node, num_tokens)])
        self.tree.unlock(request.node)
        request.node = insertion.node
        if len(duplicate):
            self._duplicates.append(duplicate)
        return duplicate

    def distrust(self, request: Request) -> None:
        """What is computed of the request is not to be trusted: nobody finds it any more.

        Nor what it found here, unless that has served for a token of its own before: whoever computed that may have
        ended before any token showed what it is worth. (The first token of an imported request is not ours.)
        """
        if request.node is not None:
            num_trusted = request.cached_len // self.page_size if request.num_output_tokens > 1 else 0
            self._lower.forget(request.node, num_trusted)
            self.tree.withdraw(request.node, num_trusted)

    def release_duplicates(self, pages: Pages) -> None:
        """Nobody reads what `share` has returned any more."""
        if len(pages):
            self._duplicates = [each for each in self._duplicates if each is not pages]
            self.pool.release(pages)

    def begin_snapshot(self, request: Request, num_tokens: int) -> None:
        """Give the request pages for its state after so many tokens, if there are some: none run short for it."""
        if self.pages_per_state <= self.num_available:
            request.snapshots.append(Snapshot(num_tokens, self._allocate(self.pages_per_state)))

    def begin_from_import(self, request: Request) -> None:
        """The request goes on from the state that a peer has written, and that is verified."""
        request.state_len = 0
        if self.pages_per_state:
            request.state_from = request.snapshots[-1].pages

    def read_state(self, request: Request) -> Pages:
        """The step that is launched next reads the state that a peer wrote into pages of the request's own.

        Return those: to be given to `release_duplicates` when it has run.
        """
        pages = request.snapshots.pop().pages
        self._duplicates.append(pages)
        return pages

    def retire(self, request: Request) -> None:
        """Give the request's pages back, keeping what is computed as a cached prefix."""
        insertion = self._hand_over(request, request.computed_len)
        self.tree.use(insertion.node)
        self.sessions.ended(request, insertion.node, self.tree.now_s)
        if len(insertion.duplicate):
            self.pool.release(insertion.duplicate)
        self.pool.release(self.page_table[request.row, insertion.node.end : request.num_pages].copy())
        if self.windows.num_groups:
            self.pool.release(self._windows.hand_over(request, insertion.node))
            self.pool.release(self._windows.own(request).ravel())
        self._lower.offer(insertion.node)
        for snapshot in request.snapshots:
            self.pool.release(snapshot.pages)
        self._detach(request)

    def drop(self, request: Request) -> None:
        """Give the request's pages back without keeping anything."""
        self.pool.release(self.owned_pages(request).copy())
        self._detach(request)

    def pass_on(self, request: Request, heir: Request) -> None:
        """Let `heir`, which has the same tokens, hold what a request holds that no launched step involves.

        Not where layers are recurrent: no pages have the state of a request that runs.
        """
        assert not self.pages_per_state
        heir.node, heir.row, heir.num_pages = request.node, request.row, request.num_pages
        heir.computed_len, heir.cached_len = request.computed_len, request.cached_len
        heir.first_window, heir.windows_end = request.first_window, request.windows_end
        heir.first_own_window, heir.windows_since = request.first_own_window, request.windows_since
        heir.windows_whole_from = request.windows_whole_from
        request.node, request.row, request.num_pages = None, -1, 0
        request.first_window = request.first_own_window = request.windows_end = request.windows_since = 0
        request.windows_whole_from = 0

    def begin_import(self, request: Request) -> Pages:
        """Hand the request's own pages to a peer, which writes them; return them in order.

        A peer keeps no order with the tiers, so what was evicted for these pages must have been read.
        """
        for tier in self._tiers:
            tier.finish_saves()
        pages = self.owned_pages(request).copy()
        self.pool.begin_import(pages)
        return pages

    def finish_import(self, request: Request) -> None:
        """The peer has written every page and will not write again."""
        self.pool.finish_import(self.owned_pages(request).copy())

    def quarantine(self, request: Request) -> Pages:
        """End a request whose pages a peer may still write; `pool.release_quarantine` takes them back."""
        pages = self.owned_pages(request).copy()
        self.pool.quarantine(pages)
        self._detach(request)
        return pages

    def take_for_peer(self, count: int) -> Pages:
        """Take `count` of the available pages for no request, and open them to a peer, as `begin_import` does."""
        pages = self._allocate(count)
        for tier in self._tiers:
            tier.finish_saves()
        self.pool.begin_import(pages)
        return pages

    def sweep(self) -> None:
        """Free what was withdrawn and nobody has locked any more."""
        if self.tree.has_withdrawn:
            self.pool.uncache(self.tree.sweep())

    def audit(self, holders: Holders) -> list[str]:
        """Compare every page's state with who claims it; [] when nothing leaked and nothing is claimed twice."""
        problems = self.pool.check(
            owned=[*(self.owned_pages(request) for request in holders.owning), *self._duplicates],
            cached=[self.tree.pages()],
            importing=[*(self.owned_pages(request) for request in holders.importing), *holders.arriving],
            quarantined=list(holders.quarantined),
        )
        holders_own = sum(self._windows.own(each).size for each in (*holders.owning, *holders.importing))
        if holders_own != self._windows.num_own:
            problems.append(f"{self._windows.num_own} pages of windows are counted as requests' own, not {holders_own}")
        return problems + self.tree.check()

    def report(self) -> CacheReport:
        """Return what the cache was worth, and what it keeps."""
        tree, counts = self.tree, self.sessions.counts
        levels = [(POOL_NAME, tree.num_pages, self.pool.capacity)]
        levels += [(tier.name, tier.num_pages, tier.capacity) for tier in self._tiers]
        return CacheReport(
            prompt_tokens=self.counts.prompt_tokens,
            tiers=[TierReport(*level, found) for level, found in zip(levels, self.counts.found_tokens, strict=True)],
            evicted_pages=tree.ages.num_evicted,
            evicted_p50_s=tree.ages.quantile_s(0.5),
            evicted_p90_s=tree.ages.quantile_s(0.9),
            pins=len(tree.pins),
            pinned_pages=tree.pins.num_pages,
            most_pinned_pages=tree.pins.most_pages,
            pins_given_up=tree.pins.num_given_up,
            sessions_away=self.sessions.num_away,
            tool_calls=counts.calls,
            tool_returns=counts.returns,
            kept_returns=counts.kept_returns,
        )

    def prices(self) -> tuple[TierPrice, ...]:
        """Return what loads from each tier take."""
        return self._prices.at(self.tree.now_s, len(self.moves), self.compute_s)

    def level_of(self, tier: Tier) -> int:
        """Return which level a tier of the cache is."""
        return 1 + self._tiers.index(tier)

    def clear(self) -> None:
        """Forget every cached prefix, in all levels, that no request holds."""
        self.pool.uncache(self.tree.clear())

    def flush(self) -> int:
        """Clear, and have shared tiers find no more of it; return how many pages that were, of all levels."""
        nodes = self.tree.unlocked()
        num_pages = sum(len(node.hashes) for node in nodes)
        self._lower.forget_all(nodes)
        self.clear()
        return num_pages

    def _hand_over(self, request: Request, num_tokens: int) -> Insertion:
        """Give the tree the whole pages of the request's first `num_tokens` tokens that it lacks."""
        assert request.node is not None
        start, end = request.node.end, max(request.node.end, num_tokens // self.page_size)
        pages, tokens = self.pages_of(request)[start:end], request.tokens[: end * self.page_size]
        insertion = self.tree.extend(request.node, tokens, pages, request.extra_key, request.page_names)
        self.pool.cache(insertion.adopted)
        return insertion

    def begins_with_windows(self, request: Request) -> bool:
        """Whether the request is computed here, by layers that look into a window; else a peer sends what they see."""
        return bool(self.windows.num_groups) and not (request.is_imported and request.state_len)

    def begins_with_state(self, request: Request) -> bool:
        """Whether the request is computed here, by layers that must be given a state; else a peer sends that, too."""
        return bool(self.pages_per_state) and not (request.is_imported and request.state_len)

    def _match(self, request: Request) -> tuple[Match, list[tuple[int, int]]]:
        """Return the longest prefix that is here, or is sooner loaded than computed; and by level the pages not so."""
        deepest, not_loaded = ALL_LEVELS, list[tuple[int, int]]()
        if not self._tiers:
            return self._match_down_to(deepest, request), not_loaded
        self._lower.find(request, self.compute_s)
        while True:
            match = self._match_down_to(deepest, request)
            if self._lower.lose_missing(match):
                continue
            refused = self._lower.not_worth_loading(match, self.compute_s)
            if refused is None:
                return match, not_loaded
            deepest = refused[0] - 1
            not_loaded.append(refused)

    def _match_down_to(self, deepest: int, request: Request) -> Match:
        tokens, extra_key = self._matchable(request), request.extra_key
        if self._begins_anywhere:
            match = self.tree.match(tokens, extra_key, deepest, request.found)
            request.found = match.node
            return match
        request.found = self.tree.end_of(tokens, extra_key, request.found)
        if self.begins_with_state(request):
            return self.tree.match_state(tokens, extra_key, deepest, request.found)
        if self.begins_with_windows(request):
            return self.tree.match_windows(tokens, extra_key, deepest, request.found)
        return self.tree.match(tokens, extra_key, deepest, request.found)

    def _matchable(self, request: Request) -> I64:
        """Return the tokens that may be found: not all where the last one needs what is before it."""
        tokens = request.tokens[: request.matchable_len]
        if self._begins_anywhere:
            return tokens
        needs_more = self.begins_with_state(request) or self.begins_with_windows(request)
        return tokens[: request.num_tokens - 1] if needs_more else tokens

    def _make_room(self, level: int, node: Node, count: int) -> None:
        """Let others go from a tier until so many slots are free, as far as that can be; `node` stays."""
        if count > self._tiers[level - 1].num_free:
            self.tree.lock(node)
            self.moves.save(self.tree.make_room(level, count))
            self.tree.unlock(node)

    def _fill_row(self, request: Request, match: Match, pages: Pages) -> None:
        """Give the request a row with the pages of its match, which is locked and here, and then `pages`."""
        request.row, request.node = self._free_rows.pop(), match.node
        request.num_pages = 0
        self._append(request, np.concatenate([match.pages, *[node.pages for node in match.lower_nodes], pages]))
        request.cached_len = match.num_tokens + match.num_lower_pages * self.page_size
        request.computed_len = min(request.cached_len, request.num_tokens - 1)
        self._count(request)

    def _count(self, request: Request) -> None:
        """Count what was found of a prompt that is computed here, the first time, by the level that had it."""
        is_new = not (request.is_imported or request.num_output_tokens)
        if is_new:
            self.counts.prompt_tokens += request.num_tokens
        if not request.restored:
            self.counts.found_tokens[POOL] += is_new * (request.cached_len // self.page_size) * self.page_size
            return
        levels = np.full(request.cached_len // self.page_size, POOL)
        for restore in request.restored:
            if not restore.has_failed:
                levels[restore.start : restore.end] = restore.level
        request.restored.clear()
        if is_new:
            for level in range(len(self.counts.found_tokens)):
                self.counts.found_tokens[level] += self.page_size * int((levels == level).sum())

    def _begin_windows(self, request: Request, node: Node) -> tuple[int, int]:
        """Say what a request holds in layers with a window; return what it needs, and what is owed to it and others."""
        num_pages = self.pages_for(request.num_tokens)
        if not self.begins_with_windows(request):
            return self._windows.begin_import(request, node, num_pages), self.num_owed
        needed = self._windows.begin(request, node, num_pages)
        return needed, self.num_owed + self._windows.owed(request, node, num_pages)

    def _unlock(self, request: Request, node: Node) -> None:
        """Take the request's locks off a node, and off what it sees there."""
        if self.windows.num_groups:
            self._windows.unlock(request, node)
        self.tree.unlock(node)

    def _begin_state(self, request: Request, match: Match, pages: Pages) -> None:
        """Say where the state of an admitted request comes from, and where copies of it are made."""
        if len(pages):
            request.snapshots.append(Snapshot(request.state_len, pages))
        if self.begins_with_state(request):
            if match.lower_nodes:
                self._begin_reading(request, match)
            request.state_from = NO_PAGES if match.node.state is None else match.node.state
            request.cuts = cuts(request, request.cached_len, match.parting, self.page_size, self._lower.run_tokens)
            if request.kind == UNKNOWN and not request.num_output_tokens:  # who was retracted is no further turn
                num_pages = (request.num_tokens - 1) // self.page_size
                request.kind = self.tree.note_prompt(page_names(request, self.page_size)[:num_pages])

    def _keep_snapshots(self, request: Request, node: Node, num_tokens: int) -> None:
        """Let others begin with the state after the request's first `num_tokens` tokens, the last ones of `node`."""
        done = [each for each in request.snapshots if each.num_tokens <= num_tokens and each.num_tokens in request.cuts]
        for snapshot in done:
            request.snapshots.remove(snapshot)
            if node.end * self.page_size == snapshot.num_tokens and node.state is None:
                self.tree.states.keep(node, snapshot.pages)
                node.kind = request.kind if snapshot.num_tokens == request.cuts[-1] else UNKNOWN
                self.pool.cache(snapshot.pages)
            else:
                self.pool.release(snapshot.pages)

    def _num_unread(self, request: Request, node: Node) -> int:
        """Return how many pages fewer can be taken once the request reads the state that it begins with."""
        return self.tree.states.num_unread(node) if self.begins_with_state(request) else 0

    def _begin_reading(self, request: Request, match: Match) -> None:
        if self.begins_with_state(request) and match.node.state is not None:
            self.tree.states.begin_reading(match.node)
            request.state_node = match.node

    def _end_reading(self, request: Request) -> None:
        """The step that began with a cached state is over, or never comes."""
        if request.state_node is not None:
            self.tree.states.end_reading(request.state_node)
            request.state_node = None

    def _allocate(self, count: int) -> Pages:
        """Allocate `count` of the available pages, evicting what is needed."""
        shortage = count - self.pool.num_free
        if shortage > 0:
            self._evict(shortage)
        pages = self.pool.allocate(count)
        assert pages is not None
        return pages

    def _evict(self, num_pages: int) -> None:
        eviction = self.tree.evict(num_pages)
        self.moves.save(eviction.saves)
        self.pool.uncache(eviction.pages)

    def _append(self, request: Request, pages: Pages) -> None:
        end = request.num_pages + len(pages)
        self.page_table[request.row, request.num_pages : end] = pages
        request.num_pages = end

    def _detach(self, request: Request) -> None:
        assert request.node is not None
        self._end_reading(request)
        self._unlock(request, request.node)
        self.sweep()
        self.page_table[request.row] = 0
        if self.windows.num_groups:
            self._windows.end(request)
        self._free_rows.append(request.row)
        request.node, request.row, request.num_pages = None, -1, 0
        request.computed_len = request.cached_len = 0
        request.state_from, request.late_len, request.cuts = None, 0, ()
        request.snapshots.clear()
