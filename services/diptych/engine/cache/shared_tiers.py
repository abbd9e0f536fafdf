"""What tiers have of a text that a radix tree does not know: asked for, found, weighed, given to others. Pure.

Tiers that are shared have pages of others, or of an earlier life. Some know what they have (files); a *store* must be
asked, which takes a while: a request waits for its answer, but never for more than a small share of the time that its
prompt would be computed in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from diptych.engine.cache.beside import Beside
from diptych.engine.cache.found_pages import claimed, held_pages, num_ids, runs_of
from diptych.engine.cache.page_ids import NOBODYS, TOKENS, PageId, chain_proofs
from diptych.engine.cache.tier import POOL, Lookup, Store, Tier
from diptych.engine.cache.tree.node_ids import end_of, ids_of
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.cache.tree.radix_node import Match, Node, joined
from diptych.engine.cache.worth_loading import worth_loading
from diptych.engine.values.request import Request, page_names
from diptych.kvtransfer.ownership import Pages

ComputeSeconds = Callable[[int, int], float]  # what computing the tokens between two counts of a prompt takes

ASKING_SHARE: Final = 0.03  # of the time that a prompt is computed in, for which it waits to know what a store has
NOT_ASKED: Final = Lookup(0.0, is_answered=True)


def never_computed(start: int, end: int) -> float:
    """Return what computing takes of which nothing is known: whatever is loaded comes sooner."""
    return math.inf


class SharedTiers:
    """Those of a cache's tiers that others fill, too."""

    def __init__(
        self,
        tree: RadixTree,
        tiers: Sequence[Tier],
        store: Store | None,
        page_size: int,
        beside: Beside,
        make_room: Callable[[int, Node, int], None],
    ) -> None:
        """`tiers`: all, with the store last. `make_room(level, node, count)`: frees slots of a tier; `node` stays."""
        self._tree = tree
        self._tiers = tiers
        self._shared = [(level, tier) for level, tier in enumerate(tiers, 1) if tier.is_shared]
        self._store = store
        self._page_size = page_size
        self._beside = beside
        self._make_room = make_room

    @property
    def run_tokens(self) -> int:
        """Tokens of a run of the store; 0: there is none."""
        return 0 if self._store is None else self._store.run_pages * self._page_size

    def look_up(self, request: Request, compute_s: ComputeSeconds) -> Lookup | None:
        """Return what a request should wait for before it is matched, as its text is asked for; None: nothing."""
        if self._store is None:
            return None
        if request.lookup is None:
            request.lookup = self._asked(self._store, request, compute_s) or NOT_ASKED
        return None if request.lookup.is_over(self._tree.now_s) else request.lookup

    def _asked(self, store: Store, request: Request, compute_s: ComputeSeconds) -> Lookup | None:
        tokens, extra_key = request.tokens[: request.matchable_len], request.extra_key
        node = self._tree.end_of(tokens, extra_key, request.found)
        first, num_pages = node.end, len(tokens) // self._page_size
        patience_s = ASKING_SHARE * compute_s(first * self._page_size, len(tokens))
        if num_pages // store.run_pages <= first // store.run_pages or store.look_up_s >= patience_s:
            return None
        names = page_names(request, self._page_size)[first:num_pages]
        parent, proof = end_of(node, self._page_size, extra_key)
        proofs = chain_proofs(proof, tokens[first * self._page_size :], self._page_size)
        ids = [PageId(TOKENS, *each) for each in zip(names, itertools.chain([parent], names), proofs, strict=False)]
        return store.look_up(first, ids, self._tree.now_s + patience_s, self._seen_from(node))

    def _seen_from(self, node: Node) -> Sequence[PageId]:
        """Return the pages of tokens up to the end of `node` that layers with a window see from there."""
        num_pages = node.end - self._beside.first(node.end)
        steps = itertools.takewhile(lambda step: step.end > node.end - num_pages, node.path())
        ids = [page_id for step in [*steps][::-1] for page_id in _token_ids(step, self._page_size)]
        return ids[len(ids) - num_pages :]

    def find(self, request: Request, compute_s: ComputeSeconds) -> None:
        """Add to the tree what shared tiers have of a request's text behind what it has, if any is loaded."""
        tokens, extra_key = request.tokens[: request.matchable_len], request.extra_key
        for level, tier in self._shared:
            node = self._tree.end_of(tokens, extra_key, request.found)
            start = node.end * self._page_size
            if level < node.level or not tier.gives_pages or not compute_s(start, len(tokens)):
                continue
            end = end_of(node, self._page_size, extra_key)
            names = page_names(request, self._page_size)[node.end :]
            held = held_pages(tier, end, names, tokens[start:], self._page_size, self._beside)
            for run in runs_of(held):
                self._make_room(level, node, num_ids(run))
                found = claimed(tier, run)
                if found is None:
                    break
                node = self._tree.adopt(node, tokens, extra_key, level, found)

    def lose_missing(self, match: Match) -> bool:
        """Forget what tiers have lost of a match; return whether that is anything."""
        for node in match.lower_nodes if self._shared else ():
            places = node.places
            num_kept = self._tiers[node.level - 1].num_kept(places)
            if num_kept < len(places):
                self._tree.lose_places(node, num_kept)
                return True
        return False

    def not_worth_loading(self, match: Match, compute_s: ComputeSeconds) -> tuple[int, int] | None:
        """Return the first level of which what is matched is computed sooner than loaded, and how many pages it is."""
        end = match.num_tokens
        for level, group in itertools.groupby(match.lower_nodes, level_of):
            held = [*group]
            start, end = end, held[-1].end * self._page_size
            load_s = self._tiers[level - 1].load_s(sum(node.num_places for node in held))
            if load_s > 0 and not worth_loading(load_s, compute_s(start, end)):
                return level, (end - start) // self._page_size
        return None

    def forget(self, node: Node, num_trusted: int) -> None:
        """Let nobody find in a tier what is computed behind the first pages of a text, nor what others made of it."""
        untrusted = [step for step in node.path() if step.end > num_trusted and not step.is_withdrawn]
        if untrusted and self._shared:
            self.forget_all([untrusted[-1], *untrusted[-1].below()])

    def forget_all(self, nodes: Sequence[Node]) -> None:
        """Let nobody find in a tier what nodes have."""
        by_node = [(node, ids_of(node, self._page_size)) for node in nodes if not node.is_withdrawn]
        ids = [page_id for _, of_node in by_node for page_id in of_node]
        for _, tier in self._shared:
            if tier is not self._store:
                tier.forget(ids)
        if self._store is not None:
            size = self._store.run_pages
            last = [end for node, of_node in by_node for end in _run_ends(node, of_node, size)]
            beside = [] if self._beside.is_nothing else [*map(self._beside.last, last)]
            self._store.forget_runs(ids, [*last, *beside])

    def offer(self, node: Node) -> None:
        """Give the store what it lacks of the text that ends at `node`, as far as that is worth it.

        Of nodes in the pool alone: so has to be who has just been computed.
        """
        store = self._store
        if store is None or not store.takes_pages:
            return
        path = _sound(node)
        num_runs = _admitted_end(store, path, self._page_size) // store.run_pages
        names = [name for step in path for name in step.hashes.tolist()] if num_runs else []
        wanted = [run for run in range(num_runs) if store.lacks(TOKENS, names[(run + 1) * store.run_pages - 1])]
        ends = self._ends(store, path, num_runs * store.run_pages, names)
        if not wanted and not ends:
            return
        ids = [page_id for step in path for page_id in _token_ids(step, self._page_size)]
        pages = joined([step.pages for step in path])
        for run in wanted:
            part = slice(run * store.run_pages, (run + 1) * store.run_pages)
            store.offer(pages[part], ids[part])
        for end in ends:
            store.offer(
                self._places_of_end(path, end), self._beside.ids(ids[self._beside.first(end) : end], ids[end - 1])
            )

    def _ends(self, store: Store, path: Sequence[Node], most: int, names: Sequence[int]) -> list[int]:
        """Return behind which runs of a path, of its first `most` pages, the store lacks an end that is here.

        States lie where they were made. Of windows it is the last run before each place where texts end or part.
        """
        if self._beside.is_nothing:
            return []
        size, has_states = store.run_pages, self._beside.pages_per_state > 0
        places = [step.end for step in path if (step.state is not None if has_states else len(step.children) != 1)]
        ends = {end if has_states else end // size * size for end in places}
        group = self._beside.last(NOBODYS).group
        return [
            end
            for end in sorted(ends)
            if 0 < end <= most
            and end % size == 0
            and self._beside.is_needed(end)
            and store.lacks(group, names[end - 1])
            if self._tree.windows.are_whole(_up_to(path, end), end)
        ]

    def _places_of_end(self, path: Sequence[Node], end: int) -> Pages:
        """Return the pages of the pool that have the end behind the first `end` pages of a path, in their order."""
        steps = _up_to(path, end)
        windows = self._tree.windows.between(steps, self._beside.first(end), end).ravel()
        state = steps[-1].state if self._beside.pages_per_state else None
        return windows if state is None else joined([windows, state])


def level_of(node: Node) -> int:
    return node.level


def _token_ids(node: Node, page_size: int) -> Sequence[PageId]:
    return ids_of(node, page_size)[: len(node.pages)]


def _up_to(path: Sequence[Node], end: int) -> Sequence[Node]:
    """Return the nodes of a path that have its first `end` pages."""
    return [step for step in path if step.end - len(step.pages) < end]


def _run_ends(node: Node, ids: Sequence[PageId], run_pages: int) -> Sequence[PageId]:
    """Return the last pages of runs of the text that are among those of a node, whose ids begin with its pages'."""
    num_pages = len(node.hashes)
    return ids[-(node.end - num_pages + 1) % run_pages : num_pages : run_pages]


def _sound(node: Node) -> list[Node]:
    """Return the path to a node from below the root, as far as it is in the pool, and nobody doubts it."""
    path = [*reversed([*node.path()])]
    return [
        *itertools.takewhile(
            lambda step: step.level == POOL and step.restore is None and not step.is_withdrawn,
            (step for step in path if step.parent is not None),
        )
    ]


def _admitted_end(store: Store, path: Sequence[Node], page_size: int) -> int:
    """Return how many pages of a text a store takes: all that is before what it admits."""
    return next(_admitted(store, path, page_size), 0)


def _admitted(store: Store, path: Sequence[Node], page_size: int) -> Iterator[int]:
    for step in reversed(path):
        if store.takes(step.hashes, step.num_uses, step.end * page_size):
            yield step.end
