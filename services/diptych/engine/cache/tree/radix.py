"""Decides which cached pages a prompt can reuse, and which are evicted: token prefixes -> pages.

A radix tree whose edges are runs of whole pages, so matching, inserting and evicting cost O(pages), mostly inside
numpy. The tree knows no pool: the caller moves page states, and copies bytes, by what its methods return.

With tiers, evicted pages stay in the tree as slots of the first one; what it has no room for goes down to the next one,
and is forgotten behind the last.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from diptych.common.arrays import I32, I64, TOKEN_NBYTES, U64
from diptych.common.errors import InvalidTransition
from diptych.engine.cache.cache_changes import NO_CHANGES, CacheChanges
from diptych.engine.cache.return_times import ReturnTimes
from diptych.engine.cache.tier import POOL, Books, Restore
from diptych.engine.cache.tree import radix_check
from diptych.engine.cache.tree.ages import EvictionAges
from diptych.engine.cache.tree.cached_states import CachedStates
from diptych.engine.cache.tree.cached_windows import CachedWindows
from diptych.engine.cache.tree.departures import Departures
from diptych.engine.cache.tree.eviction import SUNK, EvictionQueue, Ranking, SupersededStates
from diptych.engine.cache.tree.node_ids import ids_of
from diptych.engine.cache.tree.pins import Pin, Pins
from diptych.engine.cache.tree.radix_node import (
    NO_PAGES,
    Eviction,
    Found,
    Insertion,
    Match,
    Node,
    Save,
    joined,
    merged,
)
from diptych.engine.cache.turns import Kind, Turns
from diptych.engine.values.policy_names import EvictionPolicy
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.image_rows import is_of_rows
from diptych.generation.page_hash import chain_hashes, root_hash
from diptych.kvtransfer.ownership import Pages

ALL_LEVELS: Final = 1 << 30
NO_KEY_BYTES: Final = 7  # less than a token's: no prefix has such a key


class RadixTree:
    """The prefix cache of one worker. Prompts with different extra keys share nothing."""

    def __init__(
        self,
        page_size: int,
        *,
        policy: EvictionPolicy = "lru",
        tiers: Sequence[Books] = (),
        changes: CacheChanges = NO_CHANGES,
        windows: WindowPages = NO_WINDOWS,
        pins: Pins | None = None,
    ) -> None:
        self._page_size = page_size
        self._root = Node(b"", None, np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.uint64))
        self._ranking = Ranking(policy)
        self._tiers = tiers
        self._queues = [EvictionQueue(level) for level in range(1 + len(tiers))]  # hold every unlocked node
        self.states = CachedStates()  # behind nodes
        self.turns = Turns(page_size)
        self.windows = CachedWindows(windows, page_size)  # beside nodes
        self._superseded = SupersededStates(POOL)  # of unlocked nodes
        self.pins = Pins(0, ReturnTimes()) if pins is None else pins  # of nodes
        self.ages = EvictionAges()
        self._num_pages = 0
        self._num_evictable = 0
        self._changes = changes
        self._withdrawn: list[Node] = []  # with all that is below them
        self._num_evictions = 0  # since start
        self._num_withdrawn = 0  # since start: names them

    @property
    def now_s(self) -> float:
        """The time that `at` was given last."""
        return self._ranking.now_s

    def at(self, now_s: float) -> None:
        """Let it be this time: pins whose time is over keep nothing any more."""
        self._ranking.now_s = now_s
        self.ages.pass_time(now_s)
        for node in self.pins.over(now_s):
            self.unpin(node)

    @property
    def has_withdrawn(self) -> bool:
        """Whether `sweep` may have something to do."""
        return bool(self._withdrawn)

    @property
    def num_pages(self) -> int:
        """Pages of the pool in the tree."""
        return self._num_pages + self.states.num_pages + self.windows.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could return now."""
        return self._num_evictable + self.states.num_evictable + self.windows.num_evictable

    @property
    def num_host_pages(self) -> int:
        """Pages in tiers that have nothing but what the tree knows."""
        return sum(tier.capacity - tier.num_free for tier in self._tiers if not tier.is_shared)

    def match(
        self, token_ids: I64, extra_key: bytes = b"", deepest: int = ALL_LEVELS, known: Node | None = None
    ) -> Match:
        """Find the longest cached prefix of whole pages in levels up to `deepest`, and note that it is wanted now.

        `known`: a node that `end_of` or `reach` has found for the same text, of which there may be more now. While it
        is here, only what is behind it is looked at.
        """
        path = self._path(token_ids, extra_key, known)
        self._want(path)
        return self._matched(_down_to(deepest, path))

    def peek(self, token_ids: I64, extra_key: bytes = b"", known: Node | None = None) -> int:
        """Return how many tokens `match` would find, in all levels, and change nothing."""
        return self.reach(token_ids, extra_key, known)[1]

    def reach(self, token_ids: I64, extra_key: bytes = b"", known: Node | None = None) -> tuple[Node, int]:
        """Return the last node that a prefix of these tokens has all of, and how many tokens `match` would find.

        Changes nothing.
        """
        node = self._still(known, token_ids)
        start = node.end * self._page_size
        while start + self._page_size <= len(token_ids):
            child = node.children.get(self._key(token_ids, start, extra_key))
            if child is None:
                break
            num_common = child.num_common_pages(token_ids[start:], self._page_size)
            start += num_common * self._page_size
            if num_common < len(child.pages):
                break
            node = child
        return node, start

    def match_state(
        self, token_ids: I64, extra_key: bytes = b"", deepest: int = ALL_LEVELS, known: Node | None = None
    ) -> Match:
        """Find the longest of these prefixes behind which is a state, and note that all text is wanted."""
        path = self._path(token_ids, extra_key, known)
        self._want(path)  # all of it, or what was split off would be wanted more than what is before it
        parting = path[-1].end * self._page_size if path[-1].children else 0
        path = _down_to(deepest, path)
        while len(path) > 1 and path[-1].state is None:
            path.pop()
        return self._matched(path, parting)

    def match_windows(
        self, token_ids: I64, extra_key: bytes = b"", deepest: int = ALL_LEVELS, known: Node | None = None
    ) -> Match:
        """Find the longest of these prefixes behind which all is here that is live there; note its use."""
        path = self._path(token_ids, extra_key, known)
        self._want(path)
        path = _down_to(deepest, path)
        node, end = path[-1], self.windows.longest_whole(path[1:], path[-1].end)
        self._part(node, end)
        while node.end > end:
            assert node.parent is not None
            node = node.parent
        self._part(node, self.windows.first_live(end))
        return self._matched([*reversed(list(node.path()))])

    def _want(self, path: Sequence[Node]) -> None:
        """A path from the root is found, and wanted now."""
        for node in path:
            if node.level == POOL and not node.num_locks:
                self.ages.found(self._ranking.now_s - node.used_s, len(node.pages))
        if path[-1] is not self._root:
            self._ranking.touch(path[-1])

    def _matched(self, path: Sequence[Node], parting: int = 0) -> Match:
        if not path or path[-1] is self._root:
            return Match(self._root, NO_PAGES, 0, parting=parting)
        here = [node for node in path if _is_in_pool(node)]
        others = path[len(here) :]  # what is on its way back, and behind it what is in tiers
        restore = others[0].restore if others else None
        lower_nodes = tuple([node for node in others if node.level != POOL])
        pages = joined([node.pages for node in here])
        return Match(path[-1], pages, len(pages) * self._page_size, restore, lower_nodes, parting)

    def note_prompt(self, names: Sequence[int]) -> Kind:
        """A prompt is computed of whose whole pages these are the names: see `Turns`."""
        return self.turns.note(names, self._ranking.num_come)

    def lock_windows(self, node: Node, first: int) -> int:
        """Keep what the path to `node` has in layers with a window from page `first` on: see `CachedWindows.lock`.

        A node in which that begins is split: what is before it can go.
        """
        self._part(node, first)
        return self.windows.lock(node, first)

    def _part(self, node: Node, first: int) -> None:
        """Split the node of the path to `node` in whose middle page `first` is."""
        for step in node.path():
            num_before = first - step.end + len(step.pages)
            if step.end > first and num_before > 0:
                self._queues[step.level].add(self._split(step, num_before))
            if num_before >= 0:
                break

    def peek_windows(self, token_ids: I64, extra_key: bytes = b"", known: Node | None = None) -> int:
        """Return how many tokens `match_windows` would find, and change nothing."""
        node, num_tokens = self.reach(token_ids, extra_key, known)
        path, end = [*reversed([*node.path()])], num_tokens // self._page_size
        if node.end < end:
            path.append(node.children[self._key(token_ids, node.end * self._page_size, extra_key)])
        return self.windows.longest_whole(path, end) * self._page_size

    def peek_state(self, token_ids: I64, extra_key: bytes = b"", known: Node | None = None) -> int:
        """Return how many tokens `match_state` would find, and change nothing."""
        node, _ = self.reach(token_ids, extra_key, known)
        ends = (step.end for step in node.path() if step.state is not None)
        return next(ends, 0) * self._page_size

    def insert(self, token_ids: I64, pages: Pages, extra_key: bytes = b"") -> Insertion:
        """Add the pages that hold the KV of `token_ids`, and count a use of the prefix.

        Tokens after the last whole page are ignored.
        """
        insertion = self.extend(self._root, token_ids, pages, extra_key)
        self.use(insertion.node)
        return insertion

    def extend(
        self, node: Node, token_ids: I64, pages: Pages, extra_key: bytes = b"", names: Sequence[int] = ()
    ) -> Insertion:
        """Add the pages that hold the KV of `token_ids` behind those up to `node`, which ends a prefix of these tokens.

        `names`: of their whole pages from the first one on, as far as they are known: others are made here.
        Counts as no use: who calls `use` or locks its end ranks it. Behind what is on its way back nothing is added.
        """
        if len(pages) != len(token_ids) // self._page_size - node.end:
            raise InvalidTransition(f"{len(pages)} pages behind {node.end} do not hold {len(token_ids)} tokens")
        path = self._walk(node, token_ids, extra_key)
        if len(path) == 1 and node.level == POOL and node.restore is None:  # nothing of it is here, as mostly
            adopted = pages.copy()
            end = self._append(node, token_ids, extra_key, adopted, names=names) if len(adopted) else node
            return Insertion(end, NO_PAGES, adopted, duplicate=NO_PAGES)
        if any([step.restore is not None for step in path]):
            path = [step for step in path if step.level == POOL and step.restore is None]
            pages = pages[: path[-1].end - node.end]
        known = _pool_pages(path[1:])
        given, adopted = pages[: len(known)], pages[len(known) :].copy()
        lower_nodes = [node for node in path if node.level != POOL]
        for node in lower_nodes:
            self._drop_beside(node)  # the request has its own
        num_lower_pages = sum([len(node.pages) for node in lower_nodes])
        self.promote(lower_nodes, adopted[:num_lower_pages])
        end = path[-1]
        if num_lower_pages < len(adopted):
            end = self._append(end, token_ids, extra_key, adopted[num_lower_pages:], names=names)
        return Insertion(end, known, adopted, duplicate=given[given != known])

    def use(self, node: Node) -> None:
        """Count a use of the prefix that ends at `node`."""
        for step in node.path():
            step.num_uses += 1
        self._ranking.touch(node)

    def withdraw(self, node: Node, num_pages: int) -> None:
        """Let nobody find the prefix that ends at `node` any further than its first `num_pages`, the end of a node."""
        untrusted = [step for step in node.path() if step.end > num_pages and not step.is_withdrawn]
        if not untrusted:
            return
        top = untrusted[-1]
        assert top.parent is not None
        lost = [each for each in (top, *top.below()) if not each.is_withdrawn]
        for each in reversed(lost):
            self._changes.remove(each.hashes[::-1].tolist(), each.level)
        del top.parent.children[top.key]
        top.key = self._num_withdrawn.to_bytes(NO_KEY_BYTES, "little")
        self._num_withdrawn += 1
        top.parent.children[top.key] = top
        for each in lost:
            each.is_withdrawn = True
        self._withdrawn.append(top)

    def sweep(self) -> Pages:
        """Forget what was withdrawn and is not locked any more; return the pages of the pool."""
        gone: list[Node] = []
        for top in self._withdrawn:
            for node in reversed([top, *top.below()]):  # children first
                if node.parent is not None and node.num_locks == 0:
                    gone.append(node)
                    self._remove(node)
        self._withdrawn = [top for top in self._withdrawn if top.parent is not None]
        return self._uncounted(gone)

    def names(self, node: Node, token_ids: I64, extra_key: bytes = b"") -> U64:
        """Return the names of the whole pages of `token_ids` behind `node`, which ends a prefix of these tokens."""
        previous = root_hash(extra_key) if node is self._root else int(node.hashes[-1])
        return chain_hashes(previous, token_ids[node.end * self._page_size :], self._page_size)

    def end_of(self, token_ids: I64, extra_key: bytes = b"", known: Node | None = None) -> Node:
        """Return the node with which the longest cached prefix of whole pages ends, and count no use."""
        return self._walk(self._still(known, token_ids), token_ids, extra_key)[-1]

    def adopt(self, node: Node, token_ids: I64, extra_key: bytes, level: int, found: Found) -> Node:
        """Add what others gave to a tier, behind `node`, which ends the longest cached prefix of these tokens."""
        end = (node.end + len(found.pages)) * self._page_size
        adopted = self._append(node, token_ids[:end], extra_key, found.pages, level)
        adopted.windows, adopted.state = found.windows, found.state
        self._ranking.touch(adopted)
        return adopted

    def make_room(self, level: int, count: int) -> tuple[Save, ...]:
        """Let the lowest ranking pages of a tier go until `count` slots are free, or none of them can go."""
        saves: list[Save] = []
        self._make_room(level, count, saves)
        return merged(saves)

    def lose_places(self, node: Node, num_kept: int) -> None:
        """Forget what `node` has in a tier but for its first `num_kept` places: the others are lost."""
        if num_kept >= len(node.pages):
            self._drop_beside(node)
        else:
            lost = node
            if num_kept:
                self._queues[node.level].add(self._split(node, num_kept))
            self._forget([lost, *lost.below()])

    def promote(self, lower_nodes: Iterable[Node], pages: Pages) -> None:
        """Make `pages`, which have their KV, the places of nodes of tiers, parents first."""
        for node in lower_nodes:
            self._tiers[node.level - 1].release(node.places)
            pages = self._lift(node, pages)

    def expect(self, lower_nodes: Sequence[Node], restore: Restore) -> Node:
        """Make the pages of `restore`, where KV is coming to, the place of nodes of its tier, parents first.

        Return the last node. It is locked until `settle` or `lose`.
        """
        self.lock(lower_nodes[-1])
        pages = restore.pages
        for node in lower_nodes:
            pages = self._lift(node, pages)
            node.restore = restore
            self.windows.lock_node(node)
            if node.state is not None:
                self.states.begin_reading(node)
        return lower_nodes[-1]

    def settle(self, node: Node) -> Node:
        """The restore of which `node` is the last has ended, and the KV is here. Return the first node of it."""
        restore = node.restore
        assert restore is not None
        self._tiers[restore.level - 1].release(restore.slots)
        restored = [step for step in node.path() if step.restore is restore]
        for step in restored:
            step.restore = None
            self.windows.unlock_node(step)
            if step.state is not None:
                self.states.end_reading(step)
        self.unlock(node)
        return restored[-1]

    def lose(self, node: Node) -> Pages:
        """The restore of which `node` is the last has failed: forget its nodes, and return their pages."""
        first = self.settle(node)
        return self._forget([first, *first.below()])

    def pin(self, node: Node, pin: Pin) -> None:
        """Let the prefix that ends at `node`, which is in the pool, be evicted last until the pin's time is over."""
        self.pins.put(node, pin)
        for first in self.pins.surplus(self.now_s):
            self.unpin(first)

    def unpin(self, node: Node) -> None:
        """Let the prefix be evicted in its order again."""
        for step in self.pins.drop(node):
            if not step.num_locks:
                self._queues[step.level].add(step)

    def price(self) -> float:
        """Return what a page of the pool brings a second that is not pinned: see `EvictionAges.price`."""
        return self.ages.price(max(0, self._num_evictable - self.pins.num_pages))

    def alone(self, node: Node) -> tuple[int, int]:
        """Return how many pages of tokens, and pages in all, a text has that no other has in common with it."""
        num_tokens = num_pages = 0
        for step in node.path():
            if len(step.children) > 1:
                break
            num_tokens += len(step.pages)
            num_pages += step.num_places
        return num_tokens, num_pages

    def lock(self, node: Node) -> None:
        """Keep the prefix that ends at `node` from eviction. Locks are counted."""
        if node.parent is None and node is not self._root:
            raise InvalidTransition("lock of an evicted node")
        for step in node.path():
            if step.num_locks == 0:
                self._num_evictable -= step.num_pool_pages
            step.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Take one lock off; what no other lock holds counts as wanted now."""
        for step in node.path():
            if step.num_locks == 0:
                raise InvalidTransition("unlock of a node that is not locked")
            step.num_locks -= 1
            if step.num_locks == 0:
                self._queues[step.level].add(step)
                self._num_evictable += step.num_pool_pages
                if step.is_superseded:
                    self._superseded.add(step)
        if node is not self._root:
            self._ranking.touch(node)

    def num_evictable_below(self, num_uses: int, idle_s: float) -> int:
        """Return how many pages of the pool go before a text that was used so often, so long ago. O(nodes)."""
        return self._queues[POOL].num_pages_below(self._ranking.standing(num_uses, idle_s))

    def in_pool(self) -> Iterator[Node]:
        """Yield what is found in the pool, parents before their children."""
        return (node for node in self._root.below() if _is_in_pool(node) and not node.is_withdrawn)

    def text_of(self, node: Node) -> tuple[I64, bytes]:
        """Return the tokens of the prefix that ends at `node`, and its extra key."""
        path = [*node.path()][::-1]
        extra_key = path[0].key[: -self._page_size * TOKEN_NBYTES]
        return np.concatenate([step.tokens for step in path]), extra_key

    def evict(self, num_pages: int) -> Eviction:
        """Give up the `num_pages` lowest ranking pages of the pool, or all evictable ones if fewer."""
        evicted: list[Pages] = []
        saves: list[Save] = []
        self._num_evictions += 1
        departures = Departures(self.states.nodes, self._promise, self._num_evictions)
        while num_pages > 0 and len(gone := self.windows.pop_spare(num_pages)):
            evicted.append(gone)
            num_pages -= len(gone)
        while num_pages > 0 and (len(gone := self._evict_lowest(num_pages, saves, departures)) or self._give_up_pin()):
            evicted.append(gone)
            num_pages -= len(gone)
        while num_pages > 0 and (node := self.states.first()):
            evicted.append(self.states.pop(node))
            num_pages -= len(evicted[-1])
        while num_pages > 0 and (node := self.windows.first()):
            evicted.append(self.windows.pop(node))
            num_pages -= len(evicted[-1])
        return Eviction(evicted[0] if len(evicted) == 1 else joined(evicted), merged(saves))

    def clear(self) -> Pages:
        """Forget everything that is not locked, in all levels; return the pages of the pool."""
        pages = self._forget(self.unlocked())
        self._changes.clear()
        self._changes.store(self.hashes())  # what is locked is in the pool
        return pages

    def unlocked(self) -> list[Node]:
        """Return the nodes that nobody holds, parents before their children."""
        return [node for node in self._root.below() if node.num_locks == 0]

    def pages(self) -> Pages:
        """Return every page of the pool that is in the tree."""
        return joined(node.held for node in self._root.below())

    def hashes(self) -> list[int]:
        """Return the hash of every page of the tree, in all levels."""
        found = (node for node in self._root.below() if not node.is_withdrawn)
        return [page_hash for node in found for page_hash in node.hashes.tolist()]

    def check(self) -> list[str]:
        """Recount everything that is maintained; return what is wrong, `[]` when clean. O(pages)."""
        nodes, counts = list(self._root.below()), (self.num_pages, self.num_evictable)
        beside = self.states.nodes, self.windows.nodes
        return radix_check.problems(nodes, counts, self._page_size, self._tiers, self._queues, *beside, self.pins)

    def _evict_lowest(self, num_pages: int, saves: list[Save], departures: Departures) -> Pages:
        """Take the lowest ranking pages out of the pool, about `num_pages`; add to `saves` what goes down."""
        node = self._superseded.pop_below(self._queues[POOL].peek()) if self.states.num_pages else None
        if node is not None:
            self._ranking.note_eviction(node.state_rank)
            return self.states.pop(node)
        if self.states.num_pages:
            self._choose_text(departures)
        lowest = self._queues[POOL].pop()
        if lowest is None:
            return NO_PAGES
        node = lowest
        if len(lowest.pages) > num_pages:
            if self._can_shorten(lowest):
                return self._shorten(lowest, num_pages)
            node = self._end_of(lowest, num_pages)
        gone, parent = node.held, node.parent
        self.states.leave(node)
        self.windows.leave(node)
        self._num_pages -= len(node.pages)
        self._num_evictable -= len(node.pages)
        self.ages.evicted(self._ranking.now_s - node.used_s, len(node.pages))
        self._ranking.note_eviction(node.rank)
        self._demote(node, saves)
        if parent is not None:
            departures.add(parent)
        return gone

    def _choose_text(self, departures: Departures) -> None:
        """Where the lowest ranking text has a state, let the one go first that is least likely to be wanted again."""
        lowest = self._queues[POOL].peek()
        if lowest is None or lowest.state is None or lowest.rank[0] == SUNK:
            return
        if not (self._ranking.is_by_worth and self.turns.is_known):
            return
        least = departures.pop(lowest)
        if least is not lowest:
            self._ranking.spare(lowest)
            departures.add(lowest)  # its worth is found anew
        for node in self._ranking.sink(least):
            self._queues[node.level].sunk(node)

    def _promise(self, node: Node) -> float:
        """Return what the text up to a state is expected to save, for the memory and the time that it takes."""
        return node.worth * self.turns.index(node.kind, self._ranking.num_come - node.used_at)

    def _give_up_pin(self) -> bool:
        """Nothing is left to evict: keep the text of a session no longer that is away. False: there is none."""
        if not len(self.pins):
            return False
        self.unpin(self.pins.first_to_go(self.now_s))
        return True

    def _can_shorten(self, leaf: Node) -> bool:
        """Whether nothing is beside its pages, and they need not go down to a tier."""
        return not self._tiers and leaf.state is None and leaf.windows is None and not leaf.is_withdrawn

    def _shorten(self, leaf: Node, num_pages: int) -> Pages:
        """Take the last pages of a leaf, which is in no queue now, out of the pool.

        The same as to split it, and to forget the lower half. An eviction nearly always wants less than a node has.
        """
        self.ages.evicted(self._ranking.now_s - leaf.used_s, num_pages)
        self._ranking.note_eviction(leaf.rank)
        num_left = len(leaf.pages) - num_pages
        self._queues[POOL].add(leaf.shortened(num_left, self._page_size))
        self._num_pages -= num_pages
        self._num_evictable -= num_pages
        self._changes.remove(leaf.hashes[: num_left - 1 : -1].tolist())
        gone = leaf.pages[num_left:]
        leaf.forget_text()
        return gone

    def _path(self, token_ids: I64, extra_key: bytes, known: Node | None) -> list[Node]:
        """Return the path from the root of the longest cached prefix, as `_walk` does."""
        node = self._still(known, token_ids)
        found = self._walk(node, token_ids, extra_key)
        return found if node is self._root else [self._root, *reversed([*node.path()]), *found[1:]]

    def _still(self, known: Node | None, token_ids: I64) -> Node:
        """Return a node that was found for these tokens if they would lead to it now, else the root."""
        if known is None or known.parent is None or known.is_withdrawn or known.end * self._page_size > len(token_ids):
            return self._root
        return known

    def _walk(self, node: Node, token_ids: I64, extra_key: bytes) -> list[Node]:
        """Return the path from `node` on of the longest cached prefix, splitting a node that is left in its middle."""
        path, start = [node], node.end * self._page_size
        while start + self._page_size <= len(token_ids):
            child = path[-1].children.get(self._key(token_ids, start, extra_key))
            if child is None:
                break
            num_common = child.num_common_pages(token_ids[start:], self._page_size)
            if num_common < len(child.pages):
                child = self._split(child, num_common)
                self._queues[child.level].add(child)
            path.append(child)
            start += num_common * self._page_size
        return path

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = node.split(num_pages, self._page_size)
        self.windows.on_split(upper, node)
        return upper

    def _key(self, token_ids: I64, start: int, extra_key: bytes) -> bytes:
        """Name the node that begins at token `start`, as `node_key` does: only at the root also by the extra key."""
        key = token_ids[start : start + self._page_size].tobytes()
        return extra_key + key if extra_key and not start else key

    def _append(
        self,
        parent: Node,
        token_ids: I64,
        extra_key: bytes,
        pages: I32,
        level: int = POOL,
        names: Sequence[int] = (),
    ) -> Node:
        end = len(token_ids) // self._page_size * self._page_size
        tokens = token_ids[end - len(pages) * self._page_size : end].astype(np.int64)
        key = self._key(token_ids, parent.end * self._page_size, extra_key)
        node_end = parent.end + len(pages)
        if len(names) >= node_end:
            hashes = np.array(array("Q", names[parent.end : node_end]))
        else:
            hashes = self.names(parent, token_ids[:end], extra_key)
        node = Node(key, parent, tokens, pages, hashes, node_end, level)
        parent.children[key] = node
        self.windows.on_end_moved(parent)
        if level == POOL:
            self._admit(node)
        else:
            self._ranking.touch_new(node)
            self._queues[level].add(node)
        node.is_withdrawn, node.has_rows = parent.is_withdrawn, bool(extra_key) and is_of_rows(extra_key)
        if not node.is_withdrawn:
            self._changes.store(node.hashes.tolist(), level)
        return node

    def _admit(self, node: Node) -> None:
        """Count a node whose pages have come to the pool."""
        self._num_pages += len(node.pages)
        self._ranking.num_come += len(node.pages)
        self._ranking.touch_new(node)
        if node.num_locks == 0:
            self._num_evictable += len(node.pages)
            self._queues[POOL].add(node)

    def _lift(self, node: Node, pages: Pages) -> Pages:
        """Move a node from a tier into the first of `pages`; return the others."""
        num_places = node.num_places
        node.move(POOL, pages[:num_places])
        self._tell_moved(node)
        self._admit(node)
        self.states.enter(node)
        self.windows.enter(node)
        return pages[num_places:]

    def _tell_moved(self, node: Node) -> None:
        if not node.is_withdrawn:
            self._changes.move(node.hashes.tolist(), node.level)

    def _pop(self, level: int, num_pages: int) -> Node | None:
        """Take the lowest ranking node of a level out of its queue, or the end of it that has `num_pages` pages."""
        node = self._queues[level].pop()
        return None if node is None else self._end_of(node, num_pages)

    def _end_of(self, node: Node, num_pages: int) -> Node:
        """Return a node that is in no queue now, or the end of it that has so many pages; the rest goes back there."""
        if len(node.pages) > num_pages:
            self._queues[node.level].add(self._split(node, len(node.pages) - num_pages))
        return node

    def _demote(self, node: Node, saves: list[Save]) -> None:
        """Move a node one level down, as far as there is room, and forget the rest; add to `saves` what to copy.

        What is beside its tokens' pages goes with all of them or not at all.
        """
        if node.level == len(self._tiers):
            self._drop_beside(node)
            self._remove_all(node)
            return
        num_saved = self._make_room(node.level + 1, node.num_places, saves) if self._is_kept_below(node) else 0
        if num_saved < node.num_places:
            self._drop_beside(node)
        if num_saved < len(node.pages):
            kept = self._split(node, num_saved) if num_saved else None
            self._remove_all(node)
            if kept is None:
                return
            node = kept
        places = node.places
        if node.level != POOL:
            self._tiers[node.level - 1].release(places)
        node.move(node.level + 1, self._tiers[node.level].allocate(len(places)))
        self._tell_moved(node)
        self._queues[node.level].add(node)
        ids = ids_of(node, self._page_size) if self._tiers[node.level - 1].is_shared else ()
        saves.append(Save(node.level, places, node.places, ids))

    def _is_kept_below(self, node: Node) -> bool:
        """Whether a node that is evicted from its level goes down a level: always, where others are kept behind it."""
        if node.is_withdrawn or node.has_rows:
            return False
        tier = self._tiers[node.level]
        return bool(node.children) or tier.admits(node.hashes, node.num_uses, node.end * self._page_size)

    def _drop_beside(self, node: Node) -> None:
        """Forget what a node has beside its tokens' pages; of the pool it is not any more."""
        if node.level != POOL:
            self._tiers[node.level - 1].release(node.places[len(node.pages) :])
        node.state = node.windows = None

    def _make_room(self, level: int, num_pages: int, saves: list[Save]) -> int:
        """Let the lowest ranking pages of a tier go until `num_pages` fit, or none is left; return how many fit."""
        if level > len(self._tiers):
            return 0
        tier = self._tiers[level - 1]
        while tier.num_free < num_pages and (node := self._pop(level, num_pages - tier.num_free)):
            self._demote(node, saves)
        return min(num_pages, tier.num_free)

    def _forget(self, nodes: Iterable[Node]) -> Pages:
        """Remove unlocked nodes, which list parents before their children; return their pages of the pool."""
        gone = list(nodes)
        for node in reversed(gone):
            self._remove(node)
        return self._uncounted(gone)

    def _uncounted(self, gone: Iterable[Node]) -> Pages:
        """Return the pages of the pool of nodes that are removed, and count them no more."""
        gone = list(gone)
        states, pages = [joined([self.states.pop(node), self.windows.pop(node)]) for node in gone], _pool_pages(gone)
        self._num_pages -= len(pages)
        self._num_evictable -= len(pages)
        return joined([*states, pages])

    def _remove_all(self, node: Node) -> None:
        """Remove a node and what is below it, which nobody holds."""
        if node.children:
            for lost in reversed(list(node.below())):
                self._remove(lost)
        self._remove(node)

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        if leaf.num_pins:
            self.unpin(leaf)
        del leaf.parent.children[leaf.key]
        self.windows.on_end_moved(leaf.parent)
        leaf.parent = None
        if leaf.level != POOL:
            self._drop_beside(leaf)
            self._tiers[leaf.level - 1].release(leaf.pages)
        if not leaf.is_withdrawn:
            self._changes.remove(leaf.hashes[::-1].tolist(), leaf.level)
        leaf.forget_text()


def _down_to(deepest: int, path: list[Node]) -> list[Node]:
    """Return the first nodes of a path, which are in levels up to `deepest`."""
    return [node for node in path if node.level <= deepest]


def _is_in_pool(node: Node) -> bool:
    return node.level == POOL and node.restore is None


def _pool_pages(nodes: Iterable[Node]) -> Pages:
    return joined([node.pages for node in nodes if node.level == POOL])
