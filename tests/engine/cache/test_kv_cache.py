from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from diptych.common.arrays import I64
from diptych.engine.cache.cache_changes import CacheChanges, CacheDelta
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tree.radix_node import Node
from diptych.engine.values.core_report import Holders
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.window_pages import WindowPages
from diptych.generation.page_hash import page_hashes
from diptych.generation.sampling_params import SamplingParams

PAGE = 4


@pytest.fixture
def cache() -> Iterator[KvCache]:
    cache = KvCache(num_pages=11, page_size=PAGE, max_requests=3, max_tokens_per_request=100)
    yield cache
    assert cache.audit(Holders()) == []


def request(*tokens: int, max_tokens: int = 8, extra_key: bytes = b"") -> Request:
    return new_request(1, np.array(tokens, dtype=np.int64), SamplingParams(max_tokens=max_tokens), extra_key=extra_key)


def test_the_longest_request_is_bounded_by_the_pool(cache: KvCache) -> None:
    assert cache.max_request_tokens == 10 * PAGE


def test_an_admitted_request_has_a_page_for_every_token(cache: KvCache) -> None:
    first = request(*range(9))
    assert cache.admit(first)
    assert len(set(cache.pages_of(first).tolist()) - {0}) == 3
    assert cache.audit(Holders([first])) == []
    cache.drop(first)
    assert cache.num_available == 10


def test_admission_leaves_the_spare_pages_alone(cache: KvCache) -> None:
    first = request(*range(9))
    assert not cache.admit(first, spare_pages=lambda _: 8)
    assert cache.num_available == 10
    assert cache.admit(first, spare_pages=lambda _: 7)
    cache.drop(first)


def test_a_flush_forgets_what_no_request_holds(cache: KvCache) -> None:
    ended, running = request(*range(8)), request(*range(50, 59))
    for each in (ended, running):
        assert cache.admit(each)
        each.computed_len = 8
    cache.retire(ended)
    cache.share(running, 8)
    assert cache.flush() == 2
    assert cache.audit(Holders([running])) == []
    again, alike = request(*range(8)), request(*range(50, 59))
    assert cache.admit(again)
    assert cache.admit(alike)
    assert (again.cached_len, alike.cached_len) == (0, 8)
    for each in (running, again, alike):
        cache.drop(each)
    assert cache.flush() == 2
    assert cache.num_available == 10


def test_a_retired_prefix_is_found_again_but_one_token_is_always_computed(cache: KvCache) -> None:
    first = request(*range(8))
    assert cache.admit(first)
    first.computed_len = 8
    cache.retire(first)
    second, third = request(*range(8)), request(*range(8), 99)
    assert cache.admit(second)
    assert cache.admit(third)
    assert (second.cached_len, third.cached_len) == (8, 8)
    assert (second.computed_len, third.computed_len) == (7, 8)
    assert cache.audit(Holders([second, third])) == []
    cache.drop(second)
    cache.drop(third)


def test_a_prefix_of_another_namespace_is_not_shared(cache: KvCache) -> None:
    first = request(*range(8), extra_key=b"tenant a")
    assert cache.admit(first)
    first.computed_len = 8
    cache.retire(first)
    second = request(*range(8), 99, extra_key=b"tenant b")
    assert cache.admit(second)
    assert second.cached_len == 0
    cache.drop(second)


def test_two_requests_that_computed_the_same_prefix_leave_one_copy(cache: KvCache) -> None:
    first, second = request(*range(8)), request(*range(8))
    for twin in (first, second):
        assert cache.admit(twin)
    for twin in (first, second):
        twin.computed_len = 8
        cache.retire(twin)
    assert cache.pool.counts()["cached"] == 2
    assert cache.num_available == 10


def test_what_a_running_request_shares_is_found_by_others(cache: KvCache) -> None:
    first, second = request(*range(9)), request(*range(9))
    assert cache.admit(first)
    assert len(cache.share(first, 7)) == 0  # one whole page
    assert cache.admit(second)
    assert (first.cached_len, second.cached_len) == (0, 4)
    assert cache.pages_of(first)[0] == cache.pages_of(second)[0]
    assert cache.audit(Holders([first, second])) == []
    cache.drop(first)
    assert cache.num_available == 10 - 3  # the page that they share is held by the other
    cache.drop(second)


def test_of_two_copies_of_a_shared_prefix_the_later_one_is_given_back_when_nobody_reads_it(cache: KvCache) -> None:
    first, second = request(*range(9)), request(*range(9))
    for twin in (first, second):
        assert cache.admit(twin)
    cache.share(first, 8)
    own = cache.pages_of(second).copy()
    duplicates = cache.share(second, 8)
    assert duplicates.tolist() == own[:2].tolist()
    assert cache.pages_of(second).tolist() == [*cache.pages_of(first)[:2].tolist(), int(own[2])]
    assert cache.audit(Holders([first, second])) == []
    cache.release_duplicates(duplicates)
    assert cache.pool.counts()["cached"] == 2
    assert cache.num_available == 10 - 2 - 2
    for twin in (first, second):
        cache.drop(twin)


def test_a_request_counts_as_one_use_of_a_prefix_however_often_it_shares() -> None:
    cache = KvCache(num_pages=11, page_size=PAGE, max_requests=3, max_tokens_per_request=100, eviction_policy="lfu")
    first = request(*range(9))
    assert cache.admit(first)
    for num_tokens in (4, 8, 9):
        cache.share(first, num_tokens)
    assert first.node is not None
    assert [node.num_uses for node in first.node.path()] == [0, 0]
    nodes = list(first.node.path())
    first.computed_len = 9
    cache.retire(first)
    assert [node.num_uses for node in nodes] == [1, 1]


def test_what_is_not_to_be_trusted_is_found_by_nobody_and_goes_with_its_last_reader() -> None:
    changes = CacheChanges()
    cache = KvCache(num_pages=21, page_size=PAGE, max_requests=4, max_tokens_per_request=100, changes=changes)
    good, bad = request(*range(8)), request(*range(16))
    assert cache.admit(good)
    cache.share(good, 8)
    assert cache.admit(bad)
    cache.share(bad, 12)
    bad.append(100)
    bad.append(101)  # what it had from others was good for a token
    reader = request(*range(14))
    assert cache.admit(reader)
    assert reader.cached_len == 12
    changes.pop()
    cache.distrust(bad)
    assert cache.cached_len(request(*range(14))) == 8  # what it had from others
    assert len(changes.pop().removed) == 1
    cache.drop(bad)
    assert cache.audit(Holders([good, reader])) == []
    fresh = request(*range(14))
    assert cache.admit(fresh)
    cache.share(fresh, 14)
    assert len(changes.pop().stored) == 1
    assert cache.cached_len(request(*range(14))) == 12
    reader.computed_len = 14
    cache.retire(reader)  # behind pages that nobody finds
    assert changes.pop() == CacheDelta()
    assert cache.audit(Holders([good, fresh])) == []
    for one in (good, fresh):
        cache.drop(one)
    assert cache.pool.counts()["cached"] == 3
    assert cache.audit(Holders()) == []


def test_what_gave_no_token_yet_is_withdrawn_with_all_it_was_built_on(cache: KvCache) -> None:
    maker, first, second = request(*range(8)), request(*range(14)), request(*range(8), *range(20, 26))
    assert cache.admit(maker)
    cache.share(maker, 8)
    cache.drop(maker)
    for reader in (first, second):
        assert cache.admit(reader)
        cache.share(reader, 14)
    cache.distrust(first)
    cache.distrust(second)
    for reader in (first, second):
        assert cache.cached_len(reader) == 0
    cache.drop(first)
    assert cache.audit(Holders([second])) == []
    cache.drop(second)
    assert cache.pool.counts()["cached"] == 0


def test_a_page_that_was_withdrawn_is_told_once() -> None:
    changes = CacheChanges()
    cache = KvCache(num_pages=21, page_size=PAGE, max_requests=4, max_tokens_per_request=100, changes=changes)
    maker, deep = request(*range(8)), request(*range(12))
    for each, num_tokens in ((maker, 8), (deep, 12)):
        assert cache.admit(each)
        cache.share(each, num_tokens)
    deep.append(1)
    deep.append(2)
    cache.distrust(deep)
    changes.pop()
    again = request(*range(12))
    assert cache.admit(again)
    cache.share(again, 12)
    cache.distrust(maker)  # with both that are below it; only one of them is known
    assert changes.pop().removed == tuple(page_hashes(again.tokens[:8], PAGE)[::-1].tolist())
    for each in (maker, deep, again):
        cache.drop(each)
    assert cache.audit(Holders()) == []


def test_growing_takes_a_page_only_when_the_last_is_full(cache: KvCache) -> None:
    first = request(*range(4))
    assert cache.admit(first)
    assert cache.grow(first, 4)
    assert first.num_pages == 1
    assert cache.grow(first, 5)
    assert first.num_pages == 2
    cache.drop(first)


def test_growing_evicts_cached_prefixes_and_fails_when_nothing_is_left(cache: KvCache) -> None:
    old = request(*range(32))
    assert cache.admit(old)
    old.computed_len = 32
    cache.retire(old)
    first = request(*range(100, 108))
    assert cache.admit(first)
    assert cache.grow(first, 40)
    assert not cache.grow(first, 41)
    assert cache.audit(Holders([first])) == []
    cache.drop(first)


def test_no_more_requests_than_rows(cache: KvCache) -> None:
    requests = [request(room) for room in range(4)]
    assert [cache.admit(one) for one in requests] == [True, True, True, False]
    for one in requests[:3]:
        cache.drop(one)


def test_quarantined_pages_stay_unavailable_until_released(cache: KvCache) -> None:
    first = request(*range(9))
    assert cache.admit(first)
    cache.begin_import(first)
    assert cache.audit(Holders(importing=[first])) == []
    pages = cache.quarantine(first)
    assert cache.num_available == 7
    assert cache.audit(Holders(quarantined=[pages])) == []
    cache.pool.release_quarantine(pages)
    assert cache.num_available == 10


def test_a_page_nobody_claims_is_reported_as_a_leak(cache: KvCache) -> None:
    first = request(*range(9))
    assert cache.admit(first)
    assert cache.audit(Holders()) != []
    cache.drop(first)


def test_a_prompt_is_not_admitted_to_pages_that_another_will_need_in_layers_with_a_window() -> None:
    windows = WindowPages(num_groups=2, window=4, step_tokens=8)  # 5 pages are held at most, 3 of them live
    cache = KvCache(num_pages=41, page_size=4, max_requests=3, max_tokens_per_request=100, windows=windows)
    first, second = request(*range(40)), request(*range(100, 116))
    assert cache.admit(first)
    assert cache.num_available == 40 - 10 - 2 * 2  # all its tokens, and a step of it in the layers with a window
    assert cache.num_owed == 2 * 3
    # 4 pages, 2 * 2 of a step, 2 * 2 later, and the other one's 6
    assert not cache.admit(second, spare_pages=lambda _: 9)
    assert cache.admit(second, spare_pages=lambda _: 8)
    assert cache.num_owed == 2 * (3 + 2)
    cache.drop(first)
    assert cache.num_owed == 2 * 2
    assert cache.grow_windows(second, 16)
    assert cache.num_owed == 0
    cache.drop(second)
    assert cache.audit(Holders()) == []


def test_what_is_behind_the_windows_can_be_evicted_while_the_prompt_goes_on() -> None:
    windows = WindowPages(num_groups=2, window=4, step_tokens=8)
    cache = KvCache(num_pages=31, page_size=4, max_requests=3, max_tokens_per_request=100, windows=windows)
    prompt = request(*range(40))
    assert cache.admit(prompt)
    for end in range(8, 41, 8):
        assert cache.grow_windows(prompt, end)
        prompt.computed_len = end
        cache.release_duplicates(cache.share(prompt, end))
        assert cache.num_available == 30 - 10 - 2 * 1  # a page is live behind each chunk
        assert cache.audit(Holders([prompt])) == []
    cache.retire(prompt)
    assert cache.num_available == 30


def test_a_prompt_that_waits_for_memory_is_compared_with_the_tree_again_only_when_that_has_changed(
    cache: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, holder, waiting = request(*range(8)), request(*range(50, 76)), request(*range(16))
    assert cache.admit(ended)
    ended.computed_len = 8
    cache.retire(ended)
    assert cache.admit(holder)
    compared, compare = list[Node](), Node.num_common_pages

    def counted(node: Node, token_ids: I64, page_size: int) -> int:
        compared.append(node)
        return compare(node, token_ids, page_size)

    monkeypatch.setattr(Node, "num_common_pages", counted)
    assert not cache.admit(waiting)
    assert len(compared) == 1, "it is looked for once"
    for _ in range(3):
        assert not cache.admit(waiting)
        assert cache.cached_len(waiting) == 8
    assert len(compared) == 1, "nothing has changed"
    cache.drop(holder)
    longer = request(*range(12))
    assert cache.admit(longer)
    longer.computed_len = 12
    cache.retire(longer)
    compared.clear()
    assert cache.cached_len(waiting) == 12
    assert [node.end for node in compared] == [3], "what has come behind the prefix, and not that"
    cache.clear()
    assert cache.cached_len(waiting) == 0


def test_a_prompt_that_waits_for_memory_does_not_find_again_what_is_not_to_be_trusted(cache: KvCache) -> None:
    holder, waiting = request(*range(20)), request(*range(40))
    assert cache.admit(holder)
    holder.computed_len = 20
    cache.share(holder, 20)
    assert not cache.admit(waiting, spare_pages=lambda _: 10)
    assert cache.cached_len(waiting) == 20
    cache.distrust(holder)
    assert cache.cached_len(waiting) == 0
    cache.drop(holder)
    assert cache.admit(waiting)
    assert waiting.cached_len == 0
    cache.drop(waiting)
