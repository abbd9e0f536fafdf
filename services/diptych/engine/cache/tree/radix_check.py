"""The invariants of a radix tree, recounted from its nodes. Each function yields what is wrong, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from diptych.engine.cache.tier import POOL, Books
from diptych.engine.cache.tree.eviction import EvictionQueue
from diptych.engine.cache.tree.pins import Pins
from diptych.engine.cache.tree.radix_node import Node


def problems(
    all_nodes: Sequence[Node],
    num_pages: tuple[int, int],
    page_size: int,
    tiers: Sequence[Books],
    in_queues: Sequence[EvictionQueue],
    with_states: Collection[Node],
    with_windows: Collection[Node],
    pins: Pins,
) -> list[str]:
    """Check everything; `num_pages`: as counted, all and those that can be evicted."""
    return [
        *counts(all_nodes, *num_pages),
        *(each for level, tier in enumerate(tiers, 1) for each in slots(all_nodes, level, tier)),
        *nodes(all_nodes, page_size),
        *queues(all_nodes, in_queues),
        *pinned(all_nodes, pins),
        *states(all_nodes, with_states),
        *windows(all_nodes, with_windows),
    ]


def counts(nodes: Sequence[Node], num_pages: int, num_evictable: int) -> Iterator[str]:
    """The pages of the pool: none twice, and as many as are counted."""
    pages = [page for node in nodes for page in node.held.tolist()]
    if len(set(pages)) < len(pages):
        yield "a page is in two places"
    if len(pages) != num_pages:
        yield f"{len(pages)} pages are counted as {num_pages}"
    evictable = sum(node.num_evictable for node in nodes)
    if evictable != num_evictable:
        yield f"{evictable} evictable pages are counted as {num_evictable}"


def states(nodes: Sequence[Node], known: Collection[Node]) -> Iterator[str]:
    """Where states are, and that none is read which could go."""
    if {node for node in nodes if node.state is not None and node.level == POOL} != set(known):
        yield f"{len(known)} nodes are known to have a state, and others have one"
    for node in nodes:
        if node.num_readers and (node.state is None or not node.num_locks):
            yield f"{node} has {node.num_readers} readers of a state, and is not locked or has none"


def windows(nodes: Sequence[Node], known: Collection[Node]) -> Iterator[str]:
    """Where pages of layers with a window are, and that none is seen whose text could go."""
    if {node for node in nodes if node.windows is not None and node.level == POOL} != set(known):
        yield f"{len(known)} nodes are known to have pages of windows, and others have some"
    for node in nodes:
        if node.num_window_pages > len(node.pages) or not 0 <= node.num_window_locks <= node.num_locks:
            yield f"{node} has {node.num_window_pages} pages of windows and {node.num_window_locks} locks of them"


def slots(nodes: Sequence[Node], level: int, books: Books) -> Iterator[str]:
    """Each slot of a tier is free, or one node's, or one that is being read."""
    used = [slot for node in nodes if node.level == level for slot in node.places.tolist()]
    restores = {id(node.restore): node.restore for node in nodes if node.restore is not None}
    read = [slot for each in restores.values() if each.level == level for slot in each.slots.tolist()]
    if sorted(used + read + books.free_slots().tolist()) != list(range(books.capacity)):
        yield f"{len(used + read)} used and {books.num_free} free slots are not the {books.capacity} of tier {level}"


def nodes(nodes: Sequence[Node], page_size: int) -> Iterator[str]:
    """The shape of each node, and its place below its parent."""
    for node in nodes:
        if node.parent is None or node.parent.children.get(node.key) is not node:
            yield f"{node} is not its parent's child"
        elif node.parent.level > node.level:
            yield f"{node} is below a node of tier {node.parent.level}"
        elif node.parent.restore is not None and node.level == POOL and node.restore is None:
            yield f"{node} is here, but not the node above it"
        if node.restore is not None and (node.level != POOL or node.num_locks != 1):
            yield f"{node} is on its way back"
        if not 0 < len(node.pages) * page_size == len(node.tokens) == len(node.hashes) * page_size:
            yield f"{node} has {len(node.tokens)} tokens and {len(node.hashes)} hashes"
        if node.num_locks < sum(child.num_locks for child in node.children.values()):
            yield f"{node} has fewer locks than its children"


def queues(nodes: Sequence[Node], queues: Sequence[EvictionQueue]) -> Iterator[str]:
    """Every unlocked node can be evicted, after its children, as soon as no pin keeps it."""
    unlocked = [node for node in nodes if node.num_locks == 0]
    if any(node not in queues[node.level] for node in unlocked if not node.num_pins):
        yield "an unlocked node is in no queue"
    ranks = [node.rank for node in unlocked]
    if len(set(ranks)) < len(ranks):
        yield "two nodes have one rank"
    for node in unlocked:
        if any(child.rank > node.rank for child in node.children.values()):
            yield f"{node} goes before its children"


def pinned(nodes: Sequence[Node], pins: Pins) -> Iterator[str]:
    """Every pin ends at a node of the pool, and as many are counted above it."""
    ends = {node: 0 for node in nodes}
    for node in nodes:
        for step in node.path() if node in pins else ():
            ends[step] += 1
    wrong = [node for node, number in ends.items() if node.num_pins != number or (number and node.level != POOL)]
    if wrong:
        yield f"{wrong[0]} counts {wrong[0].num_pins} pins, not {ends[wrong[0]]}"
    if sum(node in pins for node in nodes) != len(pins):
        yield f"there are {len(pins)} pins, some of nodes that are gone"
    num_pages = sum(node.num_pool_pages for node in nodes if node.num_pins)
    if num_pages != pins.num_pages:
        yield f"{num_pages} pinned pages are counted as {pins.num_pages}"
