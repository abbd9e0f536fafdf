"""The index of several workers next to a naive model of it: one set of prefixes a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from diptych.router.choose.prefix_index import KvNews, PrefixIndex

Text: TypeAlias = tuple[int, ...]
texts = st.lists(st.integers(0, 1), max_size=3)
workers = st.integers(1, 2)


class IndexAndModel(RuleBasedStateMachine):
    """Several workers tell of their caches; a naive model keeps each one's prefixes in a set."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.sequences: Counter[int] = Counter()  # that were sent
        self.heard: Counter[int] = Counter()  # the last that came
        self.caches: dict[int, set[Text]] = {}  # of workers all of whose news have come
        self.pending: set[int] = set()  # workers whose news goes on

    @rule(worker=workers, cleared=st.booleans(), stored=texts, removed=texts, more=st.booleans())
    def report(self, worker: int, cleared: bool, stored: list[int], removed: list[int], more: bool) -> None:
        self.sequences[worker] += 1
        self._receive(worker, self.sequences[worker], cleared, stored, removed, more)

    @rule(worker=workers, age=st.integers(0, 3), cleared=st.booleans(), stored=texts, more=st.booleans())
    def report_late(self, worker: int, age: int, cleared: bool, stored: list[int], more: bool) -> None:
        """A message that others overtook, or that comes once more."""
        self._receive(worker, max(0, self.sequences[worker] - age), cleared, stored, [], more)

    def _receive(
        self, worker: int, sequence: int, cleared: bool, stored: list[int], removed: list[int], more: bool
    ) -> None:
        in_order, self.heard[worker] = sequence == self.heard[worker] + 1, sequence
        if not (cleared or in_order):
            self.caches.pop(worker, None)
        cache = set() if cleared else self.caches.get(worker, set())
        gone = {text for text in cache if removed and text[: len(removed)] == tuple(removed)}
        new = set(prefixes(stored))
        news = KvNews(sequence, cleared, named(gone), named(new), more)
        self.index.apply(worker, news)
        if cleared or worker in self.caches:
            self.caches[worker] = cache - gone | new
        self.pending = self.pending | {worker} if more else self.pending - {worker}

    @rule(worker=workers)
    def lose(self, worker: int) -> None:
        self.sequences[worker] += 1

    @rule(worker=workers)
    def restart(self, worker: int) -> None:
        self.index.forget(worker)
        self.sequences.pop(worker, None)
        self.heard.pop(worker, None)
        self.caches.pop(worker, None)

    @rule(text=texts)
    def look_up(self, text: list[int]) -> None:
        num_known = {w: sum(prefix in cache for prefix in prefixes(text)) for w, cache in self.caches.items()}
        expected = {w: length for w, length in num_known.items() if length and w not in self.pending}
        assert self.index.holders({1: named(prefixes(text))}) == expected
        assert {w: self.index.num_pages(w) for w in self.caches} == {w: len(cache) for w, cache in self.caches.items()}


def prefixes(text: Sequence[int]) -> list[Text]:
    return [tuple(text[:end]) for end in range(1, len(text) + 1)]


def named(prefixes: Iterable[Text]) -> list[int]:
    return [abs(hash(text)) + 1 for text in prefixes]


TestIndexAndModel = IndexAndModel.TestCase
TestIndexAndModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
