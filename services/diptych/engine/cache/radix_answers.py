"""What a radix tree answers."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.cache.host_tier import Slots
from diptych.engine.cache.radix_node import Node
from diptych.kvtransfer.ownership import Pages


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix. Lock `node` before anything is evicted."""

    node: Node
    pages: Pages
    num_tokens: int  # of `pages`; a multiple of the page size
    host_nodes: tuple[Node, ...] = ()  # continue the prefix; `restore` brings them back

    @property
    def num_host_pages(self) -> int:
        return sum(len(node.pages) for node in self.host_nodes)


@dataclass(frozen=True, slots=True)
class Insertion:
    """Who owns the inserted pages now. One that the tree had at its position already is in `pages` only."""

    node: Node
    pages: Pages  # the tree's, for all the tokens that were inserted
    taken: Pages  # those of them that were the caller's
    duplicate: Pages  # the caller's still: the tree has other pages for these positions


@dataclass(frozen=True, slots=True)
class Eviction:
    """Pages that left the tree. Those of `saved` must be copied to `slots` before they are used again."""

    pages: Pages
    saved: Pages
    slots: Slots
