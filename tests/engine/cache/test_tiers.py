"""The KV cache over several tiers, some of which take their time and may fail: pages hold what requests expect."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slow_tier import SlowTier, Stored

from diptych.common.arrays import I64, U64
from diptych.engine.cache.cache_changes import CacheChanges
from diptych.engine.cache.host_tier import HostTier
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tier import SlotPool, Slots, Tier
from diptych.engine.cache.tree.radix import RadixTree
from diptych.engine.values.core_report import Holders
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.window_pages import WindowPages
from diptych.generation.logprobs import PromptLogprobs
from diptych.generation.page_hash import page_hashes
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.ownership import Pages

PAGE, NUM_PAGES = 2, 9


class HostMemory:
    """Implements `PageCopies` for a host tier, which may lie below another tier here."""

    def __init__(self, num_slots: int, pool: U64, above: U64) -> None:
        self.slots = np.zeros((num_slots, PAGE), np.uint64)
        self._pool = pool
        self._above = above

    def save(self, pages: Pages, slots: Slots) -> None:
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            self.slots[slot] = self._above[page]

    def finish_saves(self) -> None:
        pass

    def restore(self, number: int, slots: Slots, pages: Pages) -> bool:
        self._pool[pages] = self.slots[slots]
        return True


def request(prompt: list[int]) -> Request:
    return new_request(1, np.array(prompt, np.int64), SamplingParams(max_tokens=8))


def kv_of(tokens: I64) -> U64:
    """What is in the pages of a prefix: in all entries of a page the name of the page."""
    return np.repeat(page_hashes(tokens, PAGE), PAGE).reshape(-1, PAGE)


def state_of(tokens: I64) -> U64:
    """What is in the pages of the state behind a prefix."""
    name = page_hashes(tokens, PAGE)[-1]
    return np.array([[name + 7, name + 8], [name + 9, name]], np.uint64)


def test_pages_go_down_the_list_and_come_back_from_the_tier_that_has_them() -> None:
    tree = RadixTree(PAGE, tiers=[SlotPool(1), SlotPool(1)])
    tree.insert(np.array([1, 1, 2, 2, 3, 3]), np.array([5, 6, 7], np.int32))
    saves = [[(each.level, each.places.tolist()) for each in tree.evict(1).saves] for _ in range(3)]
    assert saves == [[(1, [7])], [(2, [0]), (1, [6])], [(2, [0]), (1, [5])]], "from the deep end, the lower tier first"
    match = tree.match(np.array([1, 1, 2, 2, 3, 3]))
    assert [(node.level, node.end) for node in match.lower_nodes] == [(1, 1), (2, 2)]
    assert tree.check() == []


def over_slow_tier() -> tuple[SlowTier, KvCache]:
    """A cache whose slow tier has the three pages of a text; its pool is full of another."""
    tier = SlowTier(8, np.zeros((NUM_PAGES, PAGE), np.uint64))
    cache = KvCache(num_pages=NUM_PAGES, page_size=PAGE, max_requests=3, max_tokens_per_request=100, tiers=[tier])
    for prompt in ([1, 1, 2, 2, 3, 3], [9] * 16):
        compute(cache, prompt)
    return tier, cache


def compute(cache: KvCache, prompt: list[int]) -> None:
    one = request(prompt)
    assert cache.admit(one)
    one.computed_len = one.num_tokens
    cache.retire(one)


def test_what_is_restored_twice_for_a_request_is_found_once() -> None:
    tier, cache = over_slow_tier()
    waiting = request([1, 1, 2, 2, 3, 3, 4])
    before = cache.counts.prompt_tokens
    for _ in range(2):
        assert not cache.admit(waiting)
        cache.finish_restore(tier.answer().number, None)
        if tier.num_asked == 1:
            compute(cache, [8] * 16)  # takes all pages again
    assert cache.admit(waiting)
    assert (tier.num_asked, cache.counts.found_tokens) == (2, [0, 6])
    assert cache.counts.prompt_tokens == before + 16 + 7


def test_what_is_sooner_computed_counts_when_its_request_is_admitted_and_not_before() -> None:
    tier, cache = over_slow_tier()
    tier.takes_s, cache.compute_s = 1.0, lambda start, end: 0.0
    waiting = request([1, 1, 2, 2, 3, 3, 4])
    for _ in range(3):
        assert not cache.admit(waiting, spare_pages=lambda _: 5)
    assert cache.counts.not_loaded == [0, 0]
    assert cache.admit(waiting)
    assert (waiting.cached_len, cache.counts.not_loaded) == (0, [0, 3])


def test_what_is_computed_meanwhile_is_not_shared_where_pages_are_on_their_way() -> None:
    tier, cache = over_slow_tier()
    waiting, scored = request([1, 1, 2, 2, 3, 3]), request([1, 1, 2, 2, 3, 3])
    scored.prompt_logprobs = PromptLogprobs(6, 0)  # so it is computed in any case
    assert not cache.admit(waiting)
    assert cache.admit(scored)
    own = cache.pages_of(scored).tolist()
    scored.computed_len = scored.num_tokens
    assert cache.share(scored, 6).tolist() == []
    assert cache.pages_of(scored).tolist() == own
    assert cache.audit(Holders([scored])) == []
    cache.finish_restore(tier.answer().number, None)
    cache.retire(scored)
    assert cache.admit(waiting)
    assert waiting.cached_len == 6
    assert cache.audit(Holders([waiting])) == []


@pytest.mark.parametrize("kind", ["host", "slow"])
@pytest.mark.parametrize("beside", ["windows", "states"])
def test_what_is_beside_a_text_goes_down_and_comes_back_with_it(kind: str, beside: str) -> None:
    game = CacheOverTiers()
    game.start(kind, 30, beside)
    game.admit([1] * 11, False)
    game.share_all(game.running[0])
    game.cache.retire(game.running.pop())
    game.cache._evict(game.cache.num_available)
    assert game.cache.pool.num_free == game.num_pages - 1
    game.admit([1] * 11, False)
    if kind == "slow":
        assert not game.running
        assert game.cache.audit(Holders()) == []
        game.cache.finish_restore(game.slow[0].answer().number, None)
        game.admit([1] * 11, False)  # which looks at all pages
    assert game.running[0].cached_len == 10
    game.requests_have_their_kv()
    game.teardown()


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "windows": {"windows": WindowPages(2, 5)},
    "states": {"pages_per_state": 2},
}
TIERS = ("slow", "shared", "host slow", "slow host", "host shared", "slow slow")


class CacheOverTiers(RuleBasedStateMachine):
    @initialize(kinds=st.sampled_from(TIERS), num_slots=st.integers(1, 15), beside=st.sampled_from([*BESIDE]))
    def start(self, kinds: str, num_slots: int, beside: str) -> None:
        self.num_pages = NUM_PAGES if beside == "nothing" else 3 * NUM_PAGES
        self.pool = np.zeros((self.num_pages, PAGE), np.uint64)
        self.slow: list[SlowTier] = []
        self.cache = KvCache(
            num_pages=self.num_pages,
            page_size=PAGE,
            max_requests=3,
            max_tokens_per_request=100,
            tiers=self.tiers(kinds, num_slots),
            changes=CacheChanges(),
            **BESIDE[beside],
        )
        self.running: list[Request] = []
        self.told: dict[int, int] = {}  # what a listener believes to be cached, and in which level

    def tiers(self, kinds: str, num_slots: int) -> list[Tier]:
        tiers: list[Tier] = []
        above, stored = self.pool, Stored()
        for kind in kinds.split():
            if kind == "host":
                host = HostMemory(num_slots, self.pool, above)
                tiers.append(HostTier(num_slots, host))
                above = host.slots
            else:
                slow = SlowTier(num_slots, self.pool, above, stored if kind == "shared" else None)
                self.slow.append(slow)
                tiers.append(slow)
                above = slow.memory
        return tiers

    @rule(prompt=prompts, is_scored=st.booleans())
    def admit(self, prompt: list[int], is_scored: bool) -> None:
        one = request(prompt)
        if is_scored:
            one.prompt_logprobs = PromptLogprobs(len(prompt), 0)
        num_asked = self.num_asked
        if self.cache.admit(one):
            self.expect_kv(one, one.cached_len // PAGE)
            self.running.append(one)
            if one.state_from is not None and len(one.state_from):
                assert np.array_equal(self.pool[one.state_from], state_of(one.tokens[: one.cached_len]))
        elif one.restore is None:
            assert self.num_asked == num_asked
        else:
            assert any(tier.is_asked for tier in self.slow)

    @property
    def num_asked(self) -> int:
        return sum(tier.num_asked for tier in self.slow)

    @precondition(lambda self: any(tier.is_asked for tier in self.slow))
    @rule(data=st.data(), fails=st.booleans())
    def answer(self, data: st.DataObject, fails: bool) -> None:
        tier = data.draw(st.sampled_from([tier for tier in self.slow if tier.is_asked]))
        event = tier.answer("gone" if fails else None)
        self.cache.finish_restore(event.number, event.error)

    @precondition(lambda self: any(tier.is_shared for tier in self.slow))
    @rule(data=st.data(), takes_s=st.sampled_from([0.0, 1.0, math.inf]), fewest_uses=st.integers(0, 2))
    def change(self, data: st.DataObject, takes_s: float, fewest_uses: int) -> None:
        """A shared tier gets slower or faster, and loses something."""
        tier = data.draw(st.sampled_from([tier for tier in self.slow if tier.is_shared]))
        tier.takes_s, tier.fewest_uses = takes_s, fewest_uses
        tier.lost.add(data.draw(st.integers(0, tier.capacity - 1)))
        self.cache.compute_s = lambda start, end: (end - start) / 4

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: st.DataObject, keeps: bool) -> None:
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if keeps:
            self.compute(one)
        (self.cache.retire if keeps else self.cache.drop)(one)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        self.share_all(self.running[data.draw(st.integers(0, len(self.running) - 1))])

    def share_all(self, one: Request) -> None:
        for cut in one.cuts:
            if cut > one.computed_len:
                self.compute(one, cut)
                self.cache.begin_snapshot(one, cut)
                for snapshot in one.snapshots:
                    self.pool[snapshot.pages] = state_of(one.tokens[:cut])
                self.cache.release_duplicates(self.cache.share(one, cut))
        self.compute(one)
        self.cache.release_duplicates(self.cache.share(one, one.computed_len))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.cache.distrust(one)
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

    def compute(self, one: Request, end: int | None = None) -> None:
        kv = kv_of(one.tokens[: end or one.num_tokens])
        first = one.computed_len // PAGE
        pages = self.cache.pages_of(one)[first : len(kv)]
        self.pool[pages] = kv[first:]
        for group, windows in enumerate(self.cache.window_table[one.row].T):
            self.pool[windows[first : len(kv)]] = kv[first:] + np.uint64(1 + group)
        one.computed_len = end or one.num_tokens

    def expect_kv(self, one: Request, num_pages: int) -> None:
        kv = kv_of(one.tokens[: one.num_tokens])[:num_pages]
        assert np.array_equal(self.pool[self.cache.pages_of(one)[:num_pages]], kv)
        for group, windows in enumerate(self.cache.window_table[one.row].T):
            seen = slice(one.first_window, num_pages)
            assert np.array_equal(self.pool[windows[seen]], kv[seen] + np.uint64(1 + group))

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.cache.audit(Holders(self.running)) == []

    @invariant()
    def requests_have_their_kv(self) -> None:
        for one in self.running:
            self.expect_kv(one, max(one.cached_len, one.computed_len) // PAGE)

    def teardown(self) -> None:
        """Once all have answered and left, nothing is held."""
        for tier in self.slow:
            while tier.is_asked:
                event = tier.answer()
                self.cache.finish_restore(event.number, event.error)
        for one in self.running:
            self.cache.drop(one)
        self.cache.clear()
        assert (self.cache.pool.num_free, self.cache.tree.num_host_pages) == (self.num_pages - 1, 0)
        assert self.cache.audit(Holders([])) == []


TestCacheOverTiers = CacheOverTiers.TestCase
TestCacheOverTiers.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
