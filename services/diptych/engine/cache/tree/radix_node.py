"""A run of cached pages in a radix tree, how to get around from it, and what a tree answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import I32, I64, U64
from diptych.engine.cache.page_ids import PageId
from diptych.engine.cache.tier import POOL, Restore, Slots
from diptych.engine.cache.turns import UNKNOWN, Kind
from diptych.kvtransfer.ownership import Pages

Rank = tuple[int, int, int]

NO_PAGES: Final[Pages] = np.empty(0, np.int32)
NO_TOKENS: Final[I64] = np.empty(0, np.int64)
NO_HASHES: Final[U64] = np.empty(0, np.uint64)


def node_key(token_ids: I64, page_size: int, extra_key: bytes = b"") -> bytes:
    """Name a node by its first page; below the root also by the extra key, which so divides the whole tree."""
    return extra_key + token_ids[:page_size].tobytes()


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A run of cached pages. Callers of the tree only hand it back to its methods.

    Below a node of some level are nodes of this level and of deeper ones; below one whose KV is on its way back, none
    whose KV is in the pool.
    """

    key: bytes  # its name among its siblings: see `node_key`
    parent: Node | None  # None: the root, or evicted
    tokens: I64  # [num_pages * page_size]
    pages: I32  # [num_pages]: pages of the KV pool, or slots of the tier of its level
    hashes: U64  # [num_pages]
    end: int = 0  # pages of the prefix that ends with this node
    level: int = POOL
    restore: Restore | None = None  # whose pages these are: its KV is not here yet
    children: dict[bytes, Node] = field(default_factory=dict)
    num_locks: int = 0  # of this node and every node below it
    num_pins: int = 0  # of texts that are kept for sessions which are away: likewise
    num_uses: int = 0  # requests that made or reused it
    used_s: float = 0.0  # when it was wanted last
    used_at: int = 0  # likewise, by pages that had come to the pool since start
    rank: Rank = (0, 0, 0)  # in the order of eviction: see `eviction`
    state_rank: Rank = (0, 0, 0)  # of its state alone, where that is superseded
    state: Pages | None = None  # the state of recurrent layers after its last token: as `pages`
    worth: int = 0  # of the state, when a prompt begins with it: see `eviction`
    kind: Kind = UNKNOWN  # of the prompt that has made it
    num_readers: int = 0  # of the state: requests that begin with it, until a step has read it
    windows: I32 | None = None  # [number, num_groups]: its last pages in layers with a window, likewise
    num_window_locks: int = 0  # of those: requests that see some of them
    is_withdrawn: bool = False  # nobody finds it any more; those who have locked it keep it
    has_rows: bool = False  # of an image, and no KV: who reads them finds those in the pool alone
    proof: bytes = b""  # of its last page, where it is known: see `page_ids`

    def __repr__(self) -> str:
        return f"Node(level={self.level} pages={self.pages.tolist()}, num_locks={self.num_locks})"

    @property
    def held(self) -> Pages:
        """All pages of the pool that it has."""
        return self.places if self.level == POOL else self.pages[:0]

    @property
    def places(self) -> I32:
        """All that it has at its level, in the order in which `move` is given others: its pages first."""
        beside = [] if self.windows is None else [self.windows.ravel()]
        if self.state is not None:
            beside.append(self.state)
        return np.concatenate([self.pages, *beside]) if beside else self.pages

    @property
    def num_places(self) -> int:
        return len(self.pages) + self.num_beside

    @property
    def num_beside(self) -> int:
        """Places of a state and of layers with a window."""
        of_windows = 0 if self.windows is None else self.windows.size
        return of_windows if self.state is None else of_windows + len(self.state)

    def move(self, level: int, places: I32) -> None:
        """Have all that it has at other places."""
        ends = np.cumsum([len(self.pages), 0 if self.windows is None else self.windows.size])
        pages, windows, state = np.split(places, ends)
        self.level, self.pages = level, pages
        self.windows = None if self.windows is None else windows.reshape(self.windows.shape)
        self.state = None if self.state is None else state

    @property
    def num_pool_pages(self) -> int:
        """Pages of the pool that hold its tokens."""
        return len(self.pages) if self.level == POOL else 0

    @property
    def num_window_pages(self) -> int:
        """How many of its last pages it has in layers with a window."""
        return 0 if self.windows is None else len(self.windows)

    @property
    def num_evictable(self) -> int:
        """Pages of the pool that could go: its tokens' while it is not locked, its state's while nobody reads it."""
        if self.level != POOL:
            return 0
        num_pages = 0 if self.num_locks else len(self.pages)
        if self.windows is not None and not self.num_window_locks:
            num_pages += self.windows.size
        return num_pages if self.state is None or self.num_readers else num_pages + len(self.state)

    @property
    def is_superseded(self) -> bool:
        """Whether it has a state, and its text goes on in one way only, to another state: then few will begin here.

        So is the end of each turn of a conversation but the last.
        """
        node = self
        while self.state is not None and len(node.children) == 1:
            (node,) = node.children.values()
            if node.state is not None:
                return True
        return False

    def path(self) -> Iterator[Node]:
        """Yield this node and the nodes above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def num_common_pages(self, token_ids: I64, page_size: int) -> int:
        """Count the whole pages with which this node and `token_ids` both begin."""
        length = min(len(self.tokens), len(token_ids))
        (differing,) = (self.tokens[:length] != token_ids[:length]).nonzero()
        return int(differing[0] if len(differing) else length) // page_size

    def split(self, num_pages: int, page_size: int) -> Node:
        """Move the first `num_pages` pages to a new parent: whoever locked this node holds both halves."""
        num_tokens = num_pages * page_size
        assert self.parent is not None
        tokens, pages, hashes = self.tokens[:num_tokens], self.pages[:num_pages], self.hashes[:num_pages]
        upper = Node(self.key, self.parent, tokens, pages, hashes, self.end - len(self.pages) + num_pages)
        upper.level, upper.restore = self.level, self.restore
        upper.num_locks, upper.num_pins = self.num_locks, self.num_pins
        upper.num_uses, upper.used_s, upper.used_at = self.num_uses, self.used_s, self.used_at
        upper.num_window_locks = self.num_window_locks
        if self.num_window_pages > len(self.pages) - num_pages:
            assert self.windows is not None
            cut = self.num_window_pages - (len(self.pages) - num_pages)
            upper.windows, self.windows = self.windows[:cut], self.windows[cut:]
        upper.rank = (*self.rank[:2], -upper.end)
        upper.is_withdrawn, upper.has_rows = self.is_withdrawn, self.has_rows
        self.parent.children[self.key] = upper
        self.parent = upper
        self.tokens, self.pages, self.hashes = self.tokens[num_tokens:], self.pages[num_pages:], self.hashes[num_pages:]
        self.key = node_key(self.tokens, page_size)
        upper.children[self.key] = self
        return upper

    def shortened(self, num_left: int, page_size: int) -> Node:
        """Put a node with the first pages in the place of this one, a leaf beside which is nothing: it is evicted."""
        assert self.parent is not None
        assert not self.children
        tokens, pages, hashes = self.tokens[: num_left * page_size], self.pages[:num_left], self.hashes[:num_left]
        kept = Node(self.key, self.parent, tokens, pages, hashes, self.end - len(self.pages) + num_left, self.level)
        kept.num_uses, kept.used_s, kept.rank = self.num_uses, self.used_s, (*self.rank[:2], -kept.end)
        self.parent.children[self.key] = kept
        self.parent = None
        return kept

    def forget_text(self) -> None:
        """It is evicted: whoever still knows it keeps no memory of the size of its text by that."""
        self.tokens, self.hashes = NO_TOKENS, NO_HASHES

    def below(self) -> Iterator[Node]:
        """Yield the nodes below this one, parents before their children."""
        waiting = list(self.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node


class Match(NamedTuple):
    """The longest cached prefix. Lock `node` before anything is evicted."""

    node: Node
    pages: Pages
    num_tokens: int  # of `pages`; a multiple of the page size
    restore: Restore | None = None  # brings what continues the prefix, and is not over
    lower_nodes: tuple[Node, ...] = ()  # continue it further, in tiers: `promote` and `expect` bring them back
    parting: int = 0  # tokens behind which it leaves a cached text that goes on otherwise, if a state was asked for

    @property
    def num_lower_pages(self) -> int:
        return sum([len(node.pages) for node in self.lower_nodes]) if self.lower_nodes else 0


@dataclass(frozen=True, slots=True)
class Found:
    """What a shared tier has of a text: places of a node to be."""

    pages: Slots
    windows: I32 | None  # [number, num_groups], of its last pages
    state: Slots | None  # behind its last page


class Insertion(NamedTuple):
    """Who owns the inserted pages now."""

    node: Node
    known: Pages  # that the tree had at their positions already
    adopted: Pages  # behind those: the tree's now, and the caller's before
    duplicate: Pages  # the caller's still: the tree has other pages for these positions

    @property
    def pages(self) -> Pages:
        """The tree's, for all the tokens that were inserted."""
        return np.concatenate([self.known, self.adopted])


@dataclass(frozen=True, slots=True)
class Save:
    """Pages that went down to a tier: they must be copied from `places` of the level above."""

    level: int  # of the tier
    places: I32
    slots: Slots
    ids: tuple[PageId, ...]  # of what is in the pages, for a tier in which others look for it; else ()


class Eviction(NamedTuple):
    """Pages that left the pool. The saves must be made, in their order, before the pages are used again."""

    pages: Pages
    saves: tuple[Save, ...]


def merged(saves: Sequence[Save]) -> tuple[Save, ...]:
    """Join neighbours that go to one tier."""
    if not saves:
        return ()
    runs = [list(run) for _, run in itertools.groupby(saves, lambda save: save.level)]
    return tuple(
        run[0]
        if len(run) == 1
        else Save(
            run[0].level,
            joined(save.places for save in run),
            joined(save.slots for save in run),
            tuple(page_id for save in run for page_id in save.ids),
        )
        for run in runs
    )


def joined(runs: Iterable[I32]) -> Pages:
    return np.concatenate([NO_PAGES, *runs])
