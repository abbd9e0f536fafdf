"""What a radix tree answers."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.host_tier import Slots
from diptych.engine.radix_node import Node
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
    """Who owns the inserted pages now. A page that the tree already had at its own position is in neither list."""

    node: Node
    taken: Pages  # the tree's
    duplicate: Pages  # the caller's still: the tree has other pages for these positions


@dataclass(frozen=True, slots=True)
class Eviction:
    """Pages that left the tree. Those of `saved` must be copied to `slots` before they are used again."""

    pages: Pages
    saved: Pages
    slots: Slots
