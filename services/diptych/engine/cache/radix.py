"""Decides which cached pages a prompt can reuse, and which are evicted: token prefixes -> pages.

A radix tree whose edges are runs of whole pages, so matching, inserting and evicting cost O(pages), mostly inside
numpy. The tree knows no pool: the caller moves page states, and copies bytes, by what its methods return.

With a host tier, evicted pages stay in the tree as slots of host memory; only what that has no room for is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from diptych.common.arrays import I32, I64
from diptych.common.errors import InvalidTransition
from diptych.engine.cache import radix_check
from diptych.engine.cache.cache_changes import NO_CHANGES, ChangeLog
from diptych.engine.cache.eviction import EvictionPolicy, EvictionQueue, Ranking
from diptych.engine.cache.host_tier import SlotPool, Slots
from diptych.engine.cache.radix_node import Eviction, Insertion, Match, Node, Tier, node_key
from diptych.generation.page_hash import chain_hashes, root_hash
from diptych.kvtransfer.ownership import Pages

NO_KEY_BYTES: Final = 7  # less than a token's: no prefix has such a key


class RadixTree:
    """The prefix cache of one worker. Prompts with different extra keys share nothing."""

    def __init__(
        self,
        page_size: int,
        *,
        policy: EvictionPolicy = "lru",
        num_host_slots: int = 0,
        changes: ChangeLog = NO_CHANGES,
    ) -> None:
        self._page_size = page_size
        self._root = Node(b"", None, np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.uint64))
        self._ranking = Ranking(policy)
        self._queues = {tier: EvictionQueue(tier) for tier in Tier}  # hold every unlocked node
        self._slots = SlotPool(num_host_slots)
        self._num_pages = 0
        self._num_evictable = 0
        self._changes = changes
        self._withdrawn: list[Node] = []  # with all that is below them
        self._num_withdrawn = 0  # since start: names them

    @property
    def has_withdrawn(self) -> bool:
        """Whether `sweep` may have something to do."""
        return bool(self._withdrawn)

    @property
    def num_pages(self) -> int:
        """Pages of the pool in the tree."""
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could return now."""
        return self._num_evictable

    @property
    def num_host_pages(self) -> int:
        return self._slots.capacity - self._slots.num_free

    def match(self, token_ids: I64, extra_key: bytes = b"") -> Match:
        """Find the longest cached prefix of whole pages, and note that it is wanted now."""
        path = self._walk(self._root, token_ids, extra_key)
        self._touch(path[-1])
        pages = _device_pages(path)
        host_nodes = tuple(node for node in path if node.tier is Tier.HOST)
        return Match(path[-1], pages, len(pages) * self._page_size, host_nodes)

    def peek(self, token_ids: I64, extra_key: bytes = b"") -> int:
        """Return how many tokens `match` would find, in both tiers, and change nothing."""
        node, start = self._root, 0
        while start + self._page_size <= len(token_ids):
            child = node.children.get(self._key(token_ids, start, extra_key))
            if child is None:
                break
            num_common = child.num_common_pages(token_ids[start:], self._page_size)
            start += num_common * self._page_size
            if num_common < len(child.pages):
                break
            node = child
        return start

    def insert(self, token_ids: I64, pages: Pages, extra_key: bytes = b"") -> Insertion:
        """Add the pages that hold the KV of `token_ids`, and count a use of the prefix.

        Tokens after the last whole page are ignored.
        """
        insertion = self.extend(self._root, token_ids, pages, extra_key)
        self.use(insertion.node)
        return insertion

    def extend(self, node: Node, token_ids: I64, pages: Pages, extra_key: bytes = b"") -> Insertion:
        """Add the pages that hold the KV of `token_ids` behind those up to `node`, which ends a prefix of these tokens.

        Counts as no use.
        """
        if len(pages) != len(token_ids) // self._page_size - node.end:
            raise InvalidTransition(f"{len(pages)} pages behind {node.end} do not hold {len(token_ids)} tokens")
        path = self._walk(node, token_ids, extra_key)
        known = _device_pages(path[1:])
        given, taken = pages[: len(known)], pages[len(known) :].copy()
        host_nodes = [node for node in path if node.tier is Tier.HOST]
        num_host_pages = sum(len(node.pages) for node in host_nodes)
        self.restore(host_nodes, taken[:num_host_pages])
        end = path[-1]
        if num_host_pages < len(taken):
            end = self._append(end, token_ids, extra_key, taken[num_host_pages:])
        self._touch(end)
        return Insertion(end, np.concatenate([known, taken]), taken, duplicate=given[given != known])

    def use(self, node: Node) -> None:
        """Count a use of the prefix that ends at `node`."""
        for step in node.path():
            step.num_uses += 1
        self._touch(node)

    def withdraw(self, node: Node, num_pages: int) -> None:
        """Let nobody find the prefix that ends at `node` any further than its first `num_pages`, the end of a node."""
        untrusted = [step for step in node.path() if step.end > num_pages and not step.is_withdrawn]
        if not untrusted:
            return
        top = untrusted[-1]
        assert top.parent is not None
        lost = [each for each in (top, *top.below()) if not each.is_withdrawn]
        self._changes.remove([page_hash for each in reversed(lost) for page_hash in each.hashes[::-1].tolist()])
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
        pages = _device_pages(gone)
        self._num_pages -= len(pages)
        self._num_evictable -= len(pages)
        return pages

    def restore(self, host_nodes: Iterable[Node], pages: Pages) -> Slots:
        """Make `pages` the place of nodes of the host tier, parents first; return the slots that have their KV."""
        slots = []
        for node in host_nodes:
            slots.append(node.pages)
            self._slots.release(node.pages)
            node.tier, node.pages, pages = Tier.DEVICE, pages[: len(node.pages)], pages[len(node.pages) :]
            self._admit(node)
        return _joined(slots)

    def lock(self, node: Node) -> None:
        """Keep the prefix that ends at `node` from eviction. Locks are counted."""
        if node.parent is None and node is not self._root:
            raise InvalidTransition("lock of an evicted node")
        for step in node.path():
            if step.num_locks == 0 and step.tier is Tier.DEVICE:
                self._num_evictable -= len(step.pages)
            step.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Take one lock off; what no other lock holds counts as wanted now."""
        for step in node.path():
            if step.num_locks == 0:
                raise InvalidTransition("unlock of a node that is not locked")
            step.num_locks -= 1
            if step.num_locks == 0:
                self._ranking.touch(step)
                self._queues[step.tier].add(step)
                self._num_evictable += len(step.pages) if step.tier is Tier.DEVICE else 0

    def evict(self, num_pages: int) -> Eviction:
        """Give up the `num_pages` lowest ranking pages of the pool, or all unlocked ones if fewer."""
        evicted: list[Pages] = []
        saved: list[Pages] = []
        slots: list[Slots] = []
        while num_pages > 0 and (node := self._pop(Tier.DEVICE, num_pages)):
            evicted.append(node.pages)
            num_pages -= len(node.pages)
            self._num_pages -= len(node.pages)
            self._num_evictable -= len(node.pages)
            self._ranking.note_eviction(node)
            num_saved = 0 if node.is_withdrawn else self._make_host_room(len(node.pages))
            saved.append(node.pages[:num_saved])
            slots.append(self._demote(node, num_saved))
        return Eviction(_joined(evicted), _joined(saved), _joined(slots))

    def clear(self) -> Pages:
        """Forget everything that is not locked, in both tiers; return the pages of the pool."""
        gone = [node for node in self._root.below() if node.num_locks == 0]
        pages = _device_pages(gone)
        for node in reversed(gone):  # children first
            self._remove(node)
        self._num_pages -= len(pages)
        self._num_evictable -= len(pages)
        self._changes.clear()
        self._changes.store(self.hashes())
        return pages

    def pages(self) -> Pages:
        """Return every page of the pool that is in the tree."""
        return _device_pages(self._root.below())

    def hashes(self) -> list[int]:
        """Return the hash of every page of the tree, in both tiers."""
        found = (node for node in self._root.below() if not node.is_withdrawn)
        return [page_hash for node in found for page_hash in node.hashes.tolist()]

    def check(self) -> list[str]:
        """Recount everything that is maintained; return what is wrong, `[]` when clean. O(pages)."""
        nodes = list(self._root.below())
        counts = (self._num_pages, self._num_evictable)
        return [
            *radix_check.counts(nodes, *counts),
            *radix_check.slots(nodes, self._slots),
            *radix_check.nodes(nodes, self._page_size),
            *radix_check.queues(nodes, self._queues),
        ]

    def _walk(self, node: Node, token_ids: I64, extra_key: bytes) -> list[Node]:
        """Return the path from `node` on of the longest cached prefix, splitting a node that is left in its middle."""
        path, start = [node], node.end * self._page_size
        while start + self._page_size <= len(token_ids):
            child = path[-1].children.get(self._key(token_ids, start, extra_key))
            if child is None:
                break
            num_common = child.num_common_pages(token_ids[start:], self._page_size)
            if num_common < len(child.pages):
                child = child.split(num_common, self._page_size)
                self._ranking.touch(child)
                self._queues[child.tier].add(child)
            path.append(child)
            start += num_common * self._page_size
        return path

    def _key(self, token_ids: I64, start: int, extra_key: bytes) -> bytes:
        """Name the node that begins at token `start`: only at the root also by the extra key."""
        return node_key(token_ids[start:], self._page_size, b"" if start else extra_key)

    def _append(self, parent: Node, token_ids: I64, extra_key: bytes, pages: Pages) -> Node:
        end = len(token_ids) // self._page_size * self._page_size
        tokens = token_ids[end - len(pages) * self._page_size : end].astype(np.int64)
        previous = root_hash(extra_key) if parent is self._root else int(parent.hashes[-1])
        key = self._key(token_ids, parent.end * self._page_size, extra_key)
        hashes = chain_hashes(previous, tokens, self._page_size)
        node = Node(key, parent, tokens, pages, hashes, parent.end + len(pages))
        parent.children[key] = node
        self._admit(node)
        node.is_withdrawn = parent.is_withdrawn
        if not node.is_withdrawn:
            self._changes.store(node.hashes.tolist())
        return node

    def _admit(self, node: Node) -> None:
        """Count a node whose pages have come to the pool."""
        self._num_pages += len(node.pages)
        self._ranking.touch(node)
        if node.num_locks == 0:
            self._num_evictable += len(node.pages)
            self._queues[Tier.DEVICE].add(node)

    def _pop(self, tier: Tier, num_pages: int) -> Node | None:
        """Take the lowest ranking node of a tier out of its queue, or the end of it that has `num_pages` pages."""
        node = self._queues[tier].pop()
        if node is not None and len(node.pages) > num_pages:
            self._queues[tier].add(node.split(len(node.pages) - num_pages, self._page_size))
        return node

    def _make_host_room(self, num_pages: int) -> int:
        """Forget the lowest ranking pages of the host tier until `num_pages` fit, or none is left; return how many."""
        while self._slots.num_free < num_pages and (node := self._pop(Tier.HOST, num_pages - self._slots.num_free)):
            self._remove(node)
        return min(num_pages, self._slots.num_free)

    def _demote(self, node: Node, num_saved: int) -> Slots:
        """Move the first `num_saved` pages of a node to the host tier and forget the others; return their slots."""
        if num_saved < len(node.pages):
            kept = node.split(num_saved, self._page_size) if num_saved else None
            for lost in [*reversed(list(node.below())), node]:
                self._remove(lost)
            if kept is None:
                return np.zeros(0, np.int32)
            node = kept
        node.tier, node.pages = Tier.HOST, self._slots.allocate(num_saved)
        self._queues[Tier.HOST].add(node)
        return node.pages

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.key]
        leaf.parent = None
        if leaf.tier is Tier.HOST:
            self._slots.release(leaf.pages)
        if not leaf.is_withdrawn:
            self._changes.remove(leaf.hashes[::-1].tolist())

    def _touch(self, node: Node) -> None:
        for step in node.path():
            self._ranking.touch(step)


def _device_pages(nodes: Iterable[Node]) -> Pages:
    return _joined(node.pages for node in nodes if node.tier is Tier.DEVICE)


def _joined(runs: Iterable[I32]) -> Pages:
    return np.concatenate([np.zeros(0, np.int32), *runs])
