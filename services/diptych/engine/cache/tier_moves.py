"""Pages on their way between the pool and the tiers below it: what an eviction sends down, what a prompt brings back.

What a tier does not bring back at once is a `Restore`: its pages are the tree's, and the request waits without any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from diptych.engine.cache.shared_tiers import ComputeSeconds, level_of
from diptych.engine.cache.tier import Restore, Tier
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.cache.tree.radix_node import Match, Node, Save
from diptych.engine.values.request import Request
from diptych.kvtransfer.ownership import PagePool, Pages


class TierMoves:
    """Moves pages of a cache. Its counts leave out tiers that are shared: those count their own."""

    def __init__(self, tree: RadixTree, pool: PagePool, tiers: Sequence[Tier], page_size: int) -> None:
        """`tiers`: all, with the store last."""
        self._tree = tree
        self._pool = pool
        self._tiers = tiers
        self._page_size = page_size
        self._restores: dict[int, tuple[Restore, Node]] = {}  # on their way, by number, with their last nodes
        self._num_restores = 0  # begun since start: numbers them
        self.num_saved = 0  # pages, since start
        self.num_restored = 0  # and back

    def __len__(self) -> int:
        """How many restores are on their way."""
        return len(self._restores)

    def save(self, saves: Iterable[Save]) -> None:
        """Copy what has been evicted to where it goes, in this order."""
        for save in saves:
            self._tiers[save.level - 1].save(save.places, save.slots, save.ids)
            self.num_saved += self._num_own(save.level, len(save.slots))

    def restore(self, request: Request, match: Match, pages: Pages, compute_s: ComputeSeconds) -> Restore | None:
        """Bring what tiers have of a locked match back, into the first of `pages`, which were taken for it.

        Return what is not here yet: then the pages that are not needed for it are gone.
        """
        for level, group in itertools.groupby(match.lower_nodes, level_of):
            nodes = tuple(group)
            slots = np.concatenate([node.places for node in nodes])
            start, end = nodes[0].end - len(nodes[0].pages), nodes[-1].end
            restore = Restore(self._num_restores, level, slots, pages[: len(slots)].copy(), start, end)
            request.restored.append(restore)
            self._num_restores += 1
            self._pool.cache(restore.pages)
            pages = pages[len(slots) :]
            if not self._tiers[level - 1].restore(restore.number, slots, restore.pages):
                restore.saved_s = self._saved_s(nodes, compute_s)
                self._expect(restore, nodes)
                self._pool.release(pages)
                return restore
            self._tree.promote(nodes, restore.pages)
            self.num_restored += self._num_own(level, len(slots))
        return None

    def _expect(self, restore: Restore, nodes: Sequence[Node]) -> None:
        self._restores[restore.number] = restore, self._tree.expect(nodes, restore)

    def finish(self, number: int, error: str | None) -> Restore:
        """A tier has brought pages back, or can't: then they are forgotten, and whoever wants them computes them."""
        restore, node = self._restores.pop(number)
        restore.has_ended = True
        if error is None:
            self._tiers[restore.level - 1].came(number)
            self._tree.settle(node)
            self.num_restored += self._num_own(restore.level, len(restore.pages))
        else:
            restore.has_failed = True
            self._pool.uncache(self._tree.lose(node))
        return restore

    def _saved_s(self, nodes: Sequence[Node], compute_s: ComputeSeconds) -> float:
        """Predict how much sooner these come, which are being restored, than if they were computed; 0: not known."""
        first, last = nodes[0], nodes[-1]
        computed_s = compute_s((first.end - len(first.pages)) * self._page_size, last.end * self._page_size)
        load_s = self._tiers[last.level - 1].load_s(0)
        return max(0.0, computed_s - load_s) if math.isfinite(computed_s) else 0.0

    def _num_own(self, level: int, num_pages: int) -> int:
        """Return how many of the pages of a tier are counted here."""
        return 0 if self._tiers[level - 1].is_shared else num_pages
