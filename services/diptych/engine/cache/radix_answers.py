"""What a radix tree answers."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.arrays import I32, I64, U64
from diptych.engine.cache.radix_node import Node
from diptych.engine.cache.tier import Restore, Slots
from diptych.kvtransfer.ownership import Pages


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix. Lock `node` before anything is evicted."""

    node: Node
    pages: Pages
    num_tokens: int  # of `pages`; a multiple of the page size
    restore: Restore | None = None  # brings what continues the prefix, and is not over
    lower_nodes: tuple[Node, ...] = ()  # continue it further, in tiers: `promote` and `expect` bring them back

    @property
    def num_lower_pages(self) -> int:
        return sum(len(node.pages) for node in self.lower_nodes)


@dataclass(frozen=True, slots=True)
class Insertion:
    """Who owns the inserted pages now. One that the tree had at its position already is in `pages` only."""

    node: Node
    pages: Pages  # the tree's, for all the tokens that were inserted
    taken: Pages  # those of them that were the caller's
    duplicate: Pages  # the caller's still: the tree has other pages for these positions


@dataclass(frozen=True, slots=True)
class Save:
    """Pages that went down to a tier: they must be copied from `places` of the level above."""

    level: int  # of the tier
    places: I32
    slots: Slots
    names: U64
    tokens: I64  # of the pages


@dataclass(frozen=True, slots=True)
class Eviction:
    """Pages that left the pool. The saves must be made, in their order, before the pages are used again."""

    pages: Pages
    saves: tuple[Save, ...]
