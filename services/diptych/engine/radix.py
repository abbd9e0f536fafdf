"""Decides which cached pages a prompt can reuse, and which page is evicted first: token prefixes -> pages.

A radix tree whose edges are runs of whole pages, so matching, inserting and evicting cost O(pages), mostly inside
numpy. The tree knows no pool: the caller moves page states by what `insert` and `evict` return.

Order of use is kept by one queue of the unlocked nodes, oldest first. Every use appends a path from its deep end to
the root, hence a node always stands behind its children, and the oldest is a leaf: eviction never searches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from diptych.common.errors import InvalidTransition
from diptych.engine.batch import I32, I64, U64
from diptych.engine.cache_changes import CacheChanges
from diptych.engine.page_hash import chain_hashes, root_hash
from diptych.kvtransfer.ownership import Pages


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A run of cached pages. Callers only hand it back to `lock` and `unlock`."""

    key: bytes  # its name among its siblings: see `RadixTree._key`
    parent: Node | None  # None: the root, or evicted
    tokens: I64  # [num_pages * page_size]
    pages: I32  # [num_pages]
    hashes: U64  # [num_pages]
    children: dict[bytes, Node] = field(default_factory=dict)
    num_locks: int = 0  # of this node and every node below it

    def __repr__(self) -> str:
        return f"Node(pages={self.pages.tolist()}, num_locks={self.num_locks})"


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix. Lock `node` before anything is evicted."""

    node: Node
    pages: Pages
    num_tokens: int  # a multiple of the page size


@dataclass(frozen=True, slots=True)
class Insertion:
    """Who owns the inserted pages now. A page that the tree already had at its own position is in neither list."""

    node: Node
    taken: Pages  # the tree's
    duplicate: Pages  # the caller's still: the tree has other pages for these positions


class RadixTree:
    """The prefix cache of one worker. Prompts with different salts share nothing."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root = Node(b"", None, np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.uint64))
        self._unlocked: OrderedDict[Node, None] = OrderedDict()
        self._num_pages = 0
        self._num_evictable = 0
        self._changes = CacheChanges()

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could return now."""
        return self._num_evictable

    def match(self, token_ids: I64, salt: bytes = b"") -> Match:
        """Find the longest cached prefix of whole pages, and count it as used."""
        path = self._walk(token_ids, salt)
        self._use(path[-1])
        pages = _joined(node.pages for node in path)
        return Match(path[-1], pages, len(pages) * self._page_size)

    def insert(self, token_ids: I64, pages: Pages, salt: bytes = b"") -> Insertion:
        """Add the pages that hold the KV of `token_ids`; tokens after the last whole page are ignored."""
        if len(pages) != len(token_ids) // self._page_size:
            raise InvalidTransition(f"{len(pages)} pages cannot hold the whole pages of {len(token_ids)} tokens")
        path = self._walk(token_ids, salt)
        node, known = path[-1], _joined(node.pages for node in path)
        taken = pages[len(known) :]
        if len(taken):
            node = self._append(node, token_ids, salt, taken.copy())
        self._use(node)
        given = pages[: len(known)]
        return Insertion(node, taken, duplicate=given[given != known])

    def lock(self, node: Node) -> None:
        """Keep the prefix that ends at `node` from eviction. Locks are counted."""
        if node.parent is None and node is not self._root:
            raise InvalidTransition("lock of an evicted node")
        for step in self._path(node):
            if step.num_locks == 0:
                del self._unlocked[step]
                self._num_evictable -= len(step.pages)
            step.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Take one lock off; what no other lock holds counts as used now."""
        for step in self._path(node):
            if step.num_locks == 0:
                raise InvalidTransition("unlock of a node that is not locked")
            step.num_locks -= 1
            if step.num_locks == 0:
                self._unlocked[step] = None
                self._num_evictable += len(step.pages)

    def evict(self, num_pages: int) -> Pages:
        """Forget the `num_pages` pages used longest ago, or all unlocked ones if fewer; return them."""
        evicted: list[Pages] = []
        while num_pages > 0 and self._unlocked:
            node = next(iter(self._unlocked))
            if len(node.pages) > num_pages:
                self._unlocked.move_to_end(self._split(node, len(node.pages) - num_pages), last=False)
            self._remove(node)
            evicted.append(node.pages)
            num_pages -= len(node.pages)
        return _joined(evicted)

    def clear(self) -> Pages:
        """Forget everything that is not locked; return its pages."""
        return self.evict(self._num_evictable)

    def pages(self) -> Pages:
        """Return every page of the tree."""
        return _joined(node.pages for node in self._nodes())

    def hashes(self) -> list[int]:
        """Return the hash of every page of the tree: where a new listener starts, right after `drain_events`."""
        return [page_hash for node in self._nodes() for page_hash in node.hashes.tolist()]

    def drain_events(self) -> tuple[list[int], list[int]]:
        """Return the hashes (stored, removed) since the last call. Net changes: no hash is in both."""
        return self._changes.drain()

    def check(self) -> list[str]:
        """Recount everything that is maintained; return what is wrong, `[]` when clean. O(pages)."""
        return [*self._check_counts(), *self._check_queue(), *self._check_nodes()]

    def _walk(self, token_ids: I64, salt: bytes) -> list[Node]:
        """Return the path of the longest cached prefix, root first, splitting a node that is left in its middle."""
        path, start = [self._root], 0
        while start + self._page_size <= len(token_ids):
            child = path[-1].children.get(self._key(token_ids[start:], salt if start == 0 else b""))
            if child is None:
                break
            num_common = self._num_common_pages(child.tokens, token_ids[start:])
            path.append(child if num_common == len(child.pages) else self._split(child, num_common))
            start += num_common * self._page_size
        return path

    def _key(self, token_ids: I64, salt: bytes) -> bytes:
        """Name a node by its first page; below the root also by the salt, which so divides the whole tree."""
        return salt + token_ids[: self._page_size].astype(np.int64, copy=False).tobytes()

    def _num_common_pages(self, left: I64, right: I64) -> int:
        length = min(len(left), len(right))
        differing = np.flatnonzero(left[:length] != right[:length])
        return int(differing[0] if len(differing) else length) // self._page_size

    def _append(self, parent: Node, token_ids: I64, salt: bytes, pages: Pages) -> Node:
        end = len(token_ids) // self._page_size * self._page_size
        tokens = token_ids[end - len(pages) * self._page_size : end].astype(np.int64)
        previous = root_hash(salt) if parent is self._root else int(parent.hashes[-1])
        key = self._key(tokens, salt if parent is self._root else b"")
        node = Node(key, parent, tokens, pages, chain_hashes(previous, tokens, self._page_size))
        parent.children[key] = node
        self._unlocked[node] = None
        self._num_pages += len(pages)
        self._num_evictable += len(pages)
        self._changes.store(node.hashes)
        return node

    def _split(self, node: Node, num_pages: int) -> Node:
        """Move the first `num_pages` pages of `node` to a new parent of it: whoever locked `node` holds both halves.

        The new node comes last in the queue: the caller uses it at once, or moves it.
        """
        num_tokens = num_pages * self._page_size
        assert node.parent is not None
        tokens, pages, hashes = node.tokens[:num_tokens], node.pages[:num_pages], node.hashes[:num_pages]
        upper = Node(node.key, node.parent, tokens, pages, hashes, num_locks=node.num_locks)
        node.parent.children[node.key] = upper
        node.parent = upper
        node.tokens, node.pages, node.hashes = node.tokens[num_tokens:], node.pages[num_pages:], node.hashes[num_pages:]
        node.key = self._key(node.tokens, b"")
        upper.children[node.key] = node
        if upper.num_locks == 0:
            self._unlocked[upper] = None
        return upper

    def _remove(self, leaf: Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.key]
        leaf.parent = None
        del self._unlocked[leaf]
        self._num_pages -= len(leaf.pages)
        self._num_evictable -= len(leaf.pages)
        self._changes.remove(leaf.hashes)

    def _use(self, node: Node) -> None:
        for step in self._path(node):
            if step.num_locks == 0:
                self._unlocked.move_to_end(step)

    def _path(self, node: Node) -> Iterator[Node]:
        """Yield `node` and the nodes above it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[Node]:
        """Yield every node but the root."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def _check_counts(self) -> Iterator[str]:
        pages = self.pages()
        if len(np.unique(pages)) < len(pages):
            yield "a page is in two places"
        if len(pages) != self._num_pages:
            yield f"{len(pages)} pages are counted as {self._num_pages}"
        num_evictable = sum(len(node.pages) for node in self._nodes() if node.num_locks == 0)
        if num_evictable != self._num_evictable:
            yield f"{num_evictable} evictable pages are counted as {self._num_evictable}"

    def _check_queue(self) -> Iterator[str]:
        if set(self._unlocked) != {node for node in self._nodes() if node.num_locks == 0}:
            yield "the queue is not the set of unlocked nodes"
        passed: set[Node] = set()
        for node in self._unlocked:
            passed.add(node)
            if not passed.issuperset(node.children.values()):
                yield f"{node} stands before its children in the queue"

    def _check_nodes(self) -> Iterator[str]:
        for node in self._nodes():
            if node.parent is None or node.parent.children.get(node.key) is not node:
                yield f"{node} is not its parent's child"
            if not 0 < len(node.pages) * self._page_size == len(node.tokens) == len(node.hashes) * self._page_size:
                yield f"{node} has {len(node.tokens)} tokens and {len(node.hashes)} hashes"
            if node.num_locks < sum(child.num_locks for child in node.children.values()):
                yield f"{node} has fewer locks than its children"


def _joined(runs: Iterable[I32]) -> Pages:
    return np.concatenate([np.zeros(0, np.int32), *runs])
