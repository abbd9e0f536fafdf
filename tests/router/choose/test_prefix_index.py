from __future__ import annotations

import tracemalloc
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from diptych.engine.cache.cache_changes import CacheChanges, CacheDelta
from diptych.engine.cache.kv_feed import MAX_HASHES, KvFeed, KvFeeds, KvMessage
from diptych.engine.cache.tier import SlotPool
from diptych.engine.cache.tree.radix import RadixTree
from diptych.generation.page_hash import page_hashes
from diptych.router.choose.prefix_index import KvNews, PrefixIndex, TierPart


def test_the_longest_prefix_of_each_holder_is_found() -> None:
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True, stored=(10, 11, 12)))
    index.apply(2, KvNews(1, cleared=True, stored=(10, 20)))
    index.apply(3, KvNews(1, cleared=True, stored=(30,)))
    assert index.holders({1: [10, 11, 12, 13]}) == {1: 3, 2: 1}
    assert index.holders({1: [40]}) == {}
    assert index.holders({1: []}) == {}


def test_a_change_in_order_is_applied() -> None:
    index = PrefixIndex()
    assert index.apply(1, KvNews(1, cleared=True, stored=(10, 11)))
    assert index.apply(1, KvNews(2, removed=(11,), stored=(12,)))
    assert (index.num_pages(1), index.holders({1: [10, 11]}), index.is_in_sync(1)) == (2, {1: 1}, True)


def test_after_a_gap_nothing_is_believed_until_the_worker_starts_again() -> None:
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True, stored=(10,)))
    assert not index.apply(1, KvNews(3, stored=(11,)))
    assert (index.holders({1: [10]}), index.num_pages(1), index.is_in_sync(1)) == ({}, 0, False)
    assert index.apply(1, KvNews(4, stored=(12,)))  # was on its way when we asked
    assert index.num_pages(1) == 0
    assert index.apply(1, KvNews(5, cleared=True, stored=(10, 11)))
    assert (index.holders({1: [10, 11]}), index.is_in_sync(1)) == ({1: 2}, True)


def test_a_second_gap_is_asked_about_again() -> None:
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True))
    assert [index.apply(1, KvNews(number)) for number in (3, 4, 6)] == [False, True, False]


def test_a_worker_that_does_not_begin_with_everything_is_asked() -> None:
    index = PrefixIndex()
    assert not index.apply(1, KvNews(1, stored=(10,)))
    assert index.num_pages(1) == 0


def test_a_set_that_is_not_complete_is_not_used() -> None:
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True, stored=(10,), more=True))
    assert (index.holders({1: [10]}), index.is_in_sync(1)) == ({}, False)
    index.apply(1, KvNews(2, stored=(11,)))
    assert (index.holders({1: [10, 11]}), index.is_in_sync(1)) == ({1: 2}, True)


def test_a_worker_that_is_gone_holds_nothing() -> None:
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True, stored=(10,)))
    index.forget(1)
    index.forget(2)
    assert (index.holders({1: [10]}), index.num_pages(1), index.is_in_sync(1)) == ({}, 0, False)


texts = st.lists(st.integers(0, 2), max_size=5)


class TreeAndRouter(RuleBasedStateMachine):
    """A tree, the feed of one router, and the router's copy: messages wait, get lost, and sessions break."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.worker = 0  # instance id
        self.parents: dict[int, int] = {}  # page hash -> hash of the page before it

    @initialize()
    def start(self) -> None:
        self.changes = CacheChanges()
        self.tree = RadixTree(1, tiers=[SlotPool(3)], changes=self.changes)
        self.feeds = KvFeeds()
        self.num_made = 0
        self.open()

    def open(self) -> None:
        self.feed: KvFeed = self.feeds.open()
        self.wire: deque[KvMessage] = deque()

    @rule()
    def restart(self) -> None:
        """Another instance, whose cache is empty."""
        self.index.forget(self.worker)
        self.worker += 1
        self.start()

    def copied_pages(self) -> set[int]:
        return {page for pages in self.index._holders[self.worker].sets for page in pages.hashes().tolist()}

    @rule()
    def reconnect(self) -> None:
        self.feeds.close(self.feed)
        self.index.forget(self.worker)
        self.open()

    @rule(text=texts)
    def insert(self, text: list[int]) -> None:
        pages = np.arange(self.num_made, self.num_made + len(text), dtype=np.int32)
        self.num_made += len(text)
        self.tree.insert(np.array(text, np.int64), pages)
        hashes = page_hashes(np.array(text, np.int64), 1).tolist()
        self.parents.update(zip(hashes[1:], hashes, strict=False))
        assert self.tree.check() == []

    @rule(num_pages=st.integers(1, 4))
    def evict(self, num_pages: int) -> None:
        self.tree.evict(num_pages)

    @rule()
    def clear(self) -> None:
        self.tree.clear()

    @rule()
    def step(self) -> None:
        """The scheduler reports."""
        self.feeds.add(self.changes.pop())

    @rule(max_hashes=st.integers(1, 3))
    def send(self, max_hashes: int) -> None:
        if message := self.feed.pop(max_hashes):
            self.wire.append(message)

    @rule()
    def lose(self) -> None:
        if self.wire:
            self.wire.popleft()

    @rule()
    def reorder(self) -> None:
        self.wire.rotate()

    @rule()
    def receive(self) -> None:
        if self.wire:
            message = self.wire.popleft()
            delta = message.delta
            news = KvNews(message.sequence, delta.cleared, delta.removed, delta.stored, message.more, delta.below)
            if not self.index.apply(self.worker, news):
                self.feeds.start_again(self.feed)
            pages = self.copied_pages()
            assert all(self.parents[page] in pages for page in pages if page in self.parents)

    @rule(text=texts)
    def catch_up(self, text: list[int]) -> None:
        """Whatever was lost: when something new has come through, the copy is the tree's set."""
        self.insert([3 + self.num_made])
        self.step()
        self.send(2)
        while self.wire:
            self.receive()
            self.send(2)
        assert self.index.is_in_sync(self.worker)
        assert self.copied_pages() == set(self.tree.hashes())
        holder = self.index._holders[self.worker]
        in_tiers = {page for pages in holder.lower.values() for page in pages.hashes().tolist()}
        lower = [node for node in self.tree.unlocked() if node.level]
        assert in_tiers == {page for node in lower for page in node.hashes.tolist()}
        prompt = np.array(text, np.int64)
        num_pages = self.tree.peek(prompt)
        assert self.index.holders({1: page_hashes(prompt, 1)}) == ({self.worker: num_pages} if num_pages else {})


TestTreeAndRouter = TreeAndRouter.TestCase
TestTreeAndRouter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_routers_that_hear_at_their_own_pace_know_the_same() -> None:
    feeds, prompt = KvFeeds(), [10, 11, 12]
    (quick, quick_feed), (slow, slow_feed) = ((PrefixIndex(), feeds.open()) for _ in range(2))
    for delta in (CacheDelta(stored=(*prompt, 20, 21)), CacheDelta(removed=(12, 21)), CacheDelta(stored=(30,))):
        feeds.add(delta)
        hear_all(quick, quick_feed, max_hashes=1)
    hear_all(slow, slow_feed, max_hashes=100)
    assert [index.holders({1: prompt}) for index in (quick, slow)] == [{1: 2}, {1: 2}]
    assert [index.num_pages(1) for index in (quick, slow)] == [4, 4]


def hear_all(index: PrefixIndex, feed: KvFeed, max_hashes: int) -> None:
    while message := feed.pop(max_hashes):
        delta = message.delta
        index.apply(1, KvNews(message.sequence, delta.cleared, delta.removed, delta.stored, message.more))


def test_workers_with_other_page_sizes_are_compared_in_tokens() -> None:
    prompt, index = np.arange(100), PrefixIndex()
    chains = {page_size: page_hashes(prompt, page_size) for page_size in (16, 64)}
    index.apply(1, KvNews(1, cleared=True, stored=chains[16][:5]))
    index.apply(2, KvNews(1, cleared=True, stored=chains[64]))
    assert index.holders(chains) == {1: 80, 2: 64}
    assert index.holders({16: chains[16]}) == {1: 80}


def test_ten_million_random_pages_take_at_most_64_bytes_each_at_any_time() -> None:
    random, index = np.random.default_rng(0), PrefixIndex()
    tracemalloc.start()
    for worker in range(10):
        for sequence in range(1, 62):
            pages = random.integers(0, 2**64, MAX_HASHES, np.uint64)
            index.apply(worker, KvNews(sequence, cleared=sequence == 1, stored=pages))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_pages = sum(map(index.num_pages, range(10)))
    assert num_pages == 10 * 61 * MAX_HASHES
    assert index.nbytes <= 22 * num_pages
    assert peak_bytes <= 64 * num_pages


def test_what_only_one_has_is_counted_and_who_is_not_known_is_left_out() -> None:
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True, stored=(10, 11, 12)))
    index.apply(2, KvNews(1, cleared=True, stored=(10, 20)))
    index.apply(3, KvNews(1, cleared=True, stored=(10, 11), more=True))
    assert index.only_here() == {1: 2, 2: 1}
    assert PrefixIndex().only_here() == {}


def test_of_many_pages_what_only_one_has_is_estimated() -> None:
    rng = np.random.default_rng(1)
    shared, own = (rng.integers(1, 1 << 63, size, dtype=np.uint64) for size in (100_000, 40_000))
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True, stored=np.concatenate([shared, own])))
    index.apply(2, KvNews(1, cleared=True, stored=shared))
    found = index.only_here()
    assert found[1] == pytest.approx(40_000, rel=0.12)
    assert found[2] < 1000


def test_what_lies_in_tiers_is_told_by_level_and_moves() -> None:
    """Five pages: two are in the pool, two in the first tier and one in the third."""
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True, stored=[10, 11], below=[(1, [12, 13]), (3, [14])]))
    index.apply(2, KvNews(1, cleared=True, stored=[10]))
    index.apply(3, KvNews(1, cleared=True, below=[(2, [10, 11])]))
    chain = {16: [10, 11, 12, 13, 14, 15]}
    found = index.find(chain)
    assert found.num_tokens == index.holders(chain) == {1: 80, 2: 16, 3: 32}
    assert found.lower == {1: [TierPart(1, 32, 64), TierPart(3, 64, 80)], 3: [TierPart(2, 0, 32)]}
    assert (index.num_pages(1), index.only_here()) == (5, {1: 3, 2: 0, 3: 0})
    index.apply(1, KvNews(2, removed=[14], stored=[12, 13], below=[(1, [11])]))
    assert index.num_pages(1) == 4
    index.apply(1, KvNews(3, stored=[11]))
    found = index.find(chain)
    assert (found.num_tokens[1], set(found.lower)) == (64, {3})


def test_a_worker_that_tells_of_more_tiers_than_any_has_is_not_believed() -> None:
    index = PrefixIndex()
    index.apply(1, KvNews(1, cleared=True, below=[(level, [level]) for level in range(1, 10)]))
    assert not index.is_in_sync(1)
