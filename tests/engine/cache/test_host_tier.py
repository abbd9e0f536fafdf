"""The KV cache with host memory below it: what is in a page is always what its request expects there."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.engine.cache.cache_changes import CacheChanges
from diptych.engine.cache.host_tier import HostTier
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tier import SlotPool, Slots
from diptych.engine.values.core_report import Holders
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.ownership import Pages

PAGE, NUM_PAGES, NUM_SLOTS = 2, 9, 5
EMPTY: tuple[int, ...] = ()


class Memory:
    """A pool and a host tier whose pages say which prefix they hold the last tokens of."""

    def __init__(self) -> None:
        self.pool = dict.fromkeys(range(NUM_PAGES), EMPTY)
        self.slots = dict.fromkeys(range(NUM_SLOTS), EMPTY)

    def save(self, pages: Pages, slots: Slots) -> None:
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            self.slots[slot] = self.pool[page]

    def finish_saves(self) -> None:
        pass

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            self.pool[page] = self.slots[slot]
        return True


def make_cache(memory: Memory, num_slots: int = NUM_SLOTS) -> KvCache:
    return KvCache(
        num_pages=NUM_PAGES,
        page_size=PAGE,
        max_requests=3,
        max_tokens_per_request=100,
        tiers=[HostTier(num_slots, memory)],
        changes=CacheChanges(),
    )


def request(*tokens: int) -> Request:
    return new_request(1, np.array(tokens, np.int64), SamplingParams(max_tokens=8))


def run(cache: KvCache, memory: Memory, *tokens: int) -> Request:
    """Admit a request, compute its prompt and retire it."""
    one = request(*tokens)
    assert cache.admit(one)
    compute(cache, memory, one)
    cache.retire(one)
    return one


def compute(cache: KvCache, memory: Memory, one: Request) -> None:
    tokens = one.tokens[: one.num_tokens].tolist()
    for index, page in enumerate(cache.pages_of(one).tolist()):
        if (index + 1) * PAGE > one.computed_len:
            memory.pool[page] = tuple(tokens[: (index + 1) * PAGE])
    one.computed_len = one.num_tokens


def test_an_evicted_prefix_comes_back_from_host_memory() -> None:
    memory = Memory()
    cache = make_cache(memory)
    run(cache, memory, 1, 1, 2, 2, 3, 3)
    run(cache, memory, *[9] * 16)  # needs every page
    assert (cache.moves.num_saved, cache.tree.num_host_pages) == (3, 3)
    one = request(1, 1, 2, 2, 3, 3, 4)
    assert cache.admit(one)
    assert (one.cached_len, one.computed_len, cache.moves.num_restored) == (6, 6, 3)
    assert [memory.pool[page] for page in cache.pages_of(one)[:3].tolist()] == [
        (1, 1),
        (1, 1, 2, 2),
        (1, 1, 2, 2, 3, 3),
    ]
    assert cache.audit(Holders([one])) == []


def test_a_retracted_request_finds_its_kv_again() -> None:
    memory = Memory()
    cache = make_cache(memory)
    one = run(cache, memory, 1, 1, 2, 2, 3)
    run(cache, memory, *[9] * 16)
    assert cache.admit(one)
    assert one.cached_len == 4


def test_a_failed_admission_restores_nothing() -> None:
    memory = Memory()
    cache = make_cache(memory)
    run(cache, memory, 1, 1, 2, 2)
    holder = request(*[9] * 16)
    assert cache.admit(holder)
    assert not cache.admit(request(1, 1, 2, 2, 5))
    assert (cache.moves.num_restored, cache.tree.num_host_pages) == (0, 2)
    assert cache.audit(Holders([holder])) == []


def test_a_cleared_cache_has_nothing_in_either_tier() -> None:
    memory = Memory()
    cache = make_cache(memory)
    run(cache, memory, 1, 1, 2, 2)
    run(cache, memory, *[9] * 16)
    cache.clear()
    assert (cache.cached_len(request(1, 1, 2, 2, 3)), cache.tree.num_host_pages) == (0, 0)
    assert cache.num_available == NUM_PAGES - 1


def test_slots_are_given_once_and_neighbours_stay_neighbours() -> None:
    pool = SlotPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert (first.tolist(), second.tolist(), pool.num_free) == ([0, 1], [2, 3, 4], 0)
    pool.release(first)
    assert pool.allocate(2).tolist() == [0, 1]


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class CacheOverHostMemory(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(0, NUM_SLOTS))
    def start(self, num_slots: int) -> None:
        self.memory = Memory()
        self.cache = make_cache(self.memory, num_slots)
        self.running: list[Request] = []
        self.told: dict[int, int] = {}  # what a listener believes to be cached, and in which level

    @rule(prompt=prompts)
    def admit(self, prompt: list[int]) -> None:
        one = request(*prompt)
        expected = self.cache.cached_len(one)
        if self.cache.admit(one):
            assert one.cached_len == expected
            assert one.computed_len == min(expected, len(prompt) - 1)
            for index, page in enumerate(self.cache.pages_of(one)[: expected // PAGE].tolist()):
                assert self.memory.pool[page] == tuple(prompt[: (index + 1) * PAGE])
            self.running.append(one)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), computes=st.booleans(), keeps=st.booleans())
    def end(self, data: st.DataObject, computes: bool, keeps: bool) -> None:
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if computes:
            compute(self.cache, self.memory, one)
        (self.cache.retire if keeps else self.cache.drop)(one)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        one = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        compute(self.cache, self.memory, one)
        self.cache.release_duplicates(self.cache.share(one, one.computed_len))
        assert one.node is not None
        assert one.node.end == one.computed_len // PAGE
        prompt = one.tokens[: one.num_tokens].tolist()
        for index, page in enumerate(self.cache.pages_of(one)[: one.node.end].tolist()):
            assert self.memory.pool[page] == tuple(prompt[: (index + 1) * PAGE])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_output_tokens=st.sampled_from((0, 2)))
    def end_without_a_token(self, data: st.DataObject, num_output_tokens: int) -> None:
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for _ in range(num_output_tokens if self.cache.grow(one, one.num_tokens + num_output_tokens) else 0):
            one.append(0)
        assert one.node is not None
        num_trusted = one.cached_len // PAGE if one.num_output_tokens else 0
        distrusted = self.cache.pages_of(one)[num_trusted : one.node.end].tolist()
        self.cache.distrust(one)
        found = self.cache.tree.match(one.tokens[: one.num_tokens]).pages.tolist()
        assert not set(distrusted) & set(found)
        self.cache.drop(one)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @rule()
    def report(self) -> None:
        news = self.cache.changes.pop()
        if news.cleared:
            self.told.clear()
        for page_hash in news.removed:
            del self.told[page_hash]
        for level, hashes in news.placed():
            self.told.update(dict.fromkeys(hashes, level))
        found = [node for node in self.cache.tree.unlocked() if not node.is_withdrawn]
        assert {self.told[page_hash] == node.level for node in found for page_hash in node.hashes.tolist()} <= {True}
        assert self.told.keys() == set(self.cache.tree.hashes())

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.cache.audit(Holders(self.running)) == []


TestCacheOverHostMemory = CacheOverHostMemory.TestCase
TestCacheOverHostMemory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
