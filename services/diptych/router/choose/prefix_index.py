"""Which workers hold which cached pages: a copy of each worker's set of page hashes, kept by its KV events.

Rule: a copy is used only while it is in sync. After a gap in the numbers it is dropped, and nothing is believed of
that worker until it starts again with `cleared`.
A worker holds a page only together with the whole prefix before it, so a prompt's cached prefix is found by bisection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from diptych.router.choose.page_set import Hashes, PageSet, prefix_lens

SAMPLE: Final = 1 << 15  # pages, at most twice as many: a millisecond or two to compare
MAX_PAGES: Final = 1 << 22  # of one worker; beyond it nothing is believed of it: 64 Mi tokens in pages of 16


class KvNews(NamedTuple):
    """One message of a worker. Applied in this order: cleared, removed, stored."""

    sequence: int
    cleared: bool = False
    removed: Hashes = ()  # hashes
    stored: Hashes = ()
    more: bool = False  # the rest follows at once


@dataclass(slots=True)
class _Holder:
    """What is known of one worker's pages."""

    pages: PageSet = field(default_factory=PageSet)
    sequence: int = 0  # of the last message
    known: bool = False  # every message since `cleared` has come
    partial: bool = False  # the rest of the last news is on its way
    asked: bool = False  # to start again

    @property
    def in_sync(self) -> bool:
        return self.known and not self.partial


class PrefixIndex:
    """Page hashes -> holders, which are named by instance id."""

    def __init__(self) -> None:
        self._holders: dict[int, _Holder] = {}

    def apply(self, instance_id: int, news: KvNews) -> bool:
        """Take a worker's message; False, once a gap, when the worker must be asked to start again."""
        holder = self._holders.get(instance_id) or _Holder()
        in_order = news.sequence == holder.sequence + 1
        if news.cleared:
            holder = _Holder(known=True)
        elif not (in_order and holder.known):
            holder = _Holder(asked=in_order and holder.asked)
        self._holders[instance_id] = holder
        holder.sequence, holder.partial = news.sequence, news.more
        if not holder.known:
            must_ask, holder.asked = not holder.asked, True
            return not must_ask
        if len(news.removed):
            holder.pages.remove(news.removed)
        if len(news.stored):
            holder.pages.add(news.stored)
        if len(holder.pages) > MAX_PAGES:  # what follows finds nothing known, up to the next `cleared`
            self._holders[instance_id] = _Holder(sequence=news.sequence, asked=True)
        return True

    def forget(self, instance_id: int) -> None:
        """The worker, or the stream of its news, is gone."""
        self._holders.pop(instance_id, None)

    def holders(self, chains: Mapping[int, Hashes]) -> Mapping[int, int]:
        """Return how many leading tokens of a prompt each holder has; who has none is left out.

        `chains`: the hashes of the prompt's pages, by page size. Workers need not agree on one, and a page's hash is
        in the chain of its own size only.
        """
        known = [(key, holder.pages) for key, holder in self._holders.items() if holder.in_sync]
        sets = [pages for _, pages in known]
        found: dict[int, int] = {}
        for page_size, chain in chains.items():
            for (instance_id, _), length in zip(known, prefix_lens(sets, chain), strict=True):
                if length:
                    found[instance_id] = max(found.get(instance_id, 0), length * page_size)
        return found

    def num_pages(self, instance_id: int) -> int:
        """Pages that the worker is known to hold."""
        holder = self._holders.get(instance_id)
        return len(holder.pages) if holder else 0

    def only_here(self) -> Mapping[int, int]:
        """Return about how many pages each worker has that no other has; one that is not in sync is left out.

        Where there are many it is estimated from a sample, of the same hashes at all workers.
        """
        known = {key: holder.pages for key, holder in self._holders.items() if holder.in_sync}
        parts = 1 << (sum(map(len, known.values())) // SAMPLE).bit_length()
        sampled = [pages.sample(parts) for pages in known.values()]
        if not sampled:
            return {}
        owners = np.repeat(np.arange(len(sampled)), [len(each) for each in sampled])
        _, first, copies = np.unique(np.concatenate(sampled), return_index=True, return_counts=True)
        counts = np.bincount(owners[first[copies == 1]], minlength=len(sampled)) * parts
        return dict(zip(known, counts.tolist(), strict=True))

    @property
    def nbytes(self) -> int:
        """Memory of all copies."""
        return sum(holder.pages.nbytes for holder in self._holders.values())

    def is_in_sync(self, instance_id: int) -> bool:
        """Whether this is the worker's whole set, as of its last message."""
        holder = self._holders.get(instance_id)
        return holder is not None and holder.in_sync
