"""Which workers hold which cached pages: a copy of each worker's set of page hashes, kept by its KV events.

Rule: a copy is used only while it is in sync. After a gap in the numbers it is dropped, and nothing is believed of
that worker until it starts again with `cleared`.
A worker holds a page only together with the whole prefix before it, so a prompt's cached prefix is found by bisection.
What evicted pages went to lies behind what is in the pool, tier behind tier, so each has a set of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np

from diptych.router.choose.page_set import Hashes, PageSet, prefix_lens

SAMPLE: Final = 1 << 15  # pages, at most twice as many: a millisecond or two to compare
MAX_LEVELS: Final = 8  # of tiers of one worker, likewise
MAX_PAGES: Final = 1 << 22  # of one worker; beyond it nothing is believed of it: 64 Mi tokens in pages of 16


class KvNews(NamedTuple):
    """One message of a worker. Applied in this order: cleared, removed, stored."""

    sequence: int
    cleared: bool = False
    removed: Hashes = ()  # hashes
    stored: Hashes = ()  # in the pool
    more: bool = False  # the rest follows at once
    below: Sequence[tuple[int, Hashes]] = ()  # levels of tiers, and what is stored there


class TierPart(NamedTuple):
    """Part of a prompt that lies in one tier of a worker."""

    level: int  # of the tier, from 1
    start: int  # tokens
    end: int


class Found(NamedTuple):
    """What holders have of a prompt, by instance id."""

    num_tokens: dict[int, int]  # leading ones, wherever they lie; who has none is left out
    lower: dict[int, Sequence[TierPart]]  # of those, the parts that lie in tiers, behind what is in the pool


@dataclass(slots=True)
class _Holder:
    """What is known of one worker's pages."""

    pages: PageSet = field(default_factory=PageSet)  # of the pool
    lower: dict[int, PageSet] = field(default_factory=dict)  # of tiers, by level in their order
    sequence: int = 0  # of the last message
    known: bool = False  # every message since `cleared` has come
    partial: bool = False  # the rest of the last news is on its way
    asked: bool = False  # to start again

    @property
    def in_sync(self) -> bool:
        return self.known and not self.partial

    @property
    def sets(self) -> Sequence[PageSet]:
        return (self.pages, *self.lower.values())

    @property
    def num_pages(self) -> int:
        return sum(map(len, self.sets)) if self.lower else len(self.pages)

    @property
    def is_too_large(self) -> bool:
        return self.num_pages > MAX_PAGES or len(self.lower) > MAX_LEVELS

    def apply(self, news: KvNews) -> None:
        """Apply what has changed. A page that is stored is nowhere else."""
        if len(news.removed):
            for pages in self.sets:
                pages.remove(news.removed)
        if len(news.stored):
            for pages in self.lower.values():
                pages.remove(news.stored)
            self.pages.add(news.stored)
        for level, hashes in news.below:
            for pages in self.sets:
                pages.remove(hashes)
            self._tier(level).add(hashes)

    def _tier(self, level: int) -> PageSet:
        if level not in self.lower:
            self.lower = dict(sorted([*self.lower.items(), (level, PageSet())]))
        return self.lower[level]


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
        holder.apply(news)
        if holder.is_too_large:  # what follows finds nothing known, up to the next `cleared`
            self._holders[instance_id] = _Holder(sequence=news.sequence, asked=True)
        return True

    def forget(self, instance_id: int) -> None:
        """The worker, or the stream of its news, is gone."""
        self._holders.pop(instance_id, None)

    def holders(self, chains: Mapping[int, Hashes]) -> Mapping[int, int]:
        """Return how many leading tokens of a prompt each holder has; who has none is left out."""
        return self.find(chains).num_tokens

    def find(self, chains: Mapping[int, Hashes]) -> Found:
        """Return what each holder has of a prompt, and where.

        `chains`: the hashes of the prompt's pages, by page size. Workers need not agree on one, and a page's hash is
        in the chain of its own size only.
        """
        known = [(key, holder) for key, holder in self._holders.items() if holder.in_sync]
        if any([holder.lower for _, holder in known]):
            return _find_in_tiers(known, chains)
        sets = [holder.pages for _, holder in known]
        found: dict[int, int] = {}
        for page_size, chain in chains.items():
            for (instance_id, _), length in zip(known, prefix_lens(sets, chain), strict=True):
                if length:
                    found[instance_id] = max(found.get(instance_id, 0), length * page_size)
        return Found(found, {})

    def num_pages(self, instance_id: int) -> int:
        """Pages that the worker is known to hold."""
        holder = self._holders.get(instance_id)
        return holder.num_pages if holder else 0

    def only_here(self) -> Mapping[int, int]:
        """Return about how many pages each worker has that no other has; one that is not in sync is left out.

        Where there are many it is estimated from a sample, of the same hashes at all workers.
        """
        known = {key: holder for key, holder in self._holders.items() if holder.in_sync}
        parts = 1 << (sum(holder.num_pages for holder in known.values()) // SAMPLE).bit_length()
        sampled = [np.concatenate([pages.sample(parts) for pages in holder.sets]) for holder in known.values()]
        if not sampled:
            return {}
        owners = np.repeat(np.arange(len(sampled)), [len(each) for each in sampled])
        _, first, copies = np.unique(np.concatenate(sampled), return_index=True, return_counts=True)
        counts = np.bincount(owners[first[copies == 1]], minlength=len(sampled)) * parts
        return dict(zip(known, counts.tolist(), strict=True))

    @property
    def nbytes(self) -> int:
        """Memory of all copies."""
        return sum(pages.nbytes for holder in self._holders.values() for pages in holder.sets)

    def is_in_sync(self, instance_id: int) -> bool:
        """Whether this is the worker's whole set, as of its last message."""
        holder = self._holders.get(instance_id)
        return holder is not None and holder.in_sync


def _find_in_tiers(known: Sequence[tuple[int, _Holder]], chains: Mapping[int, Hashes]) -> Found:
    """Return the same where some have pages in tiers: a holder's sets have parts of a text, one behind the other."""
    places = [(number, 0, holder.pages) for number, (_, holder) in enumerate(known)]
    places += [(number, *each) for number, (_, holder) in enumerate(known) for each in holder.lower.items()]
    places.sort(key=itemgetter(0, 1))
    groups, sets = [number for number, _, _ in places], [pages for _, _, pages in places]
    num_tokens, lower = dict[int, int](), dict[int, Sequence[TierPart]]()
    for page_size, chain in chains.items():
        ends: dict[int, list[tuple[int, int]]] = {}
        for (number, level, _), length in zip(places, prefix_lens(sets, chain, groups), strict=True):
            ends.setdefault(number, []).append((level, length * page_size))
        for number, of_levels in ends.items():
            instance_id, most = known[number][0], of_levels[-1][1]
            if most > num_tokens.get(instance_id, 0):
                num_tokens[instance_id], lower[instance_id] = most, _parts(of_levels)
    return Found(num_tokens, {key: parts for key, parts in lower.items() if parts})


def _parts(ends: Sequence[tuple[int, int]]) -> list[TierPart]:
    """Return what the levels behind the first have, which is the pool, of those that have anything."""
    pairs = itertools.pairwise(ends)
    return [TierPart(level, start, end) for (_, start), (level, end) in pairs if end > start]
