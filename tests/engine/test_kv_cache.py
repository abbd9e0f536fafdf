from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from diptych.engine.kv_cache import KvCache
from diptych.engine.request import Request, new_request
from diptych.engine.sampling_params import SamplingParams

PAGE = 4


@pytest.fixture
def cache() -> Iterator[KvCache]:
    cache = KvCache(num_pages=11, page_size=PAGE, max_requests=3, max_tokens_per_request=100)
    yield cache
    assert cache.check([]) == []


def request(*tokens: int, max_tokens: int = 8, extra_key: bytes = b"") -> Request:
    return new_request(1, np.array(tokens, dtype=np.int64), SamplingParams(max_tokens=max_tokens), extra_key=extra_key)


def test_the_longest_request_is_bounded_by_the_pool(cache: KvCache) -> None:
    assert cache.max_request_tokens == 10 * PAGE


def test_an_admitted_request_has_a_page_for_every_token(cache: KvCache) -> None:
    first = request(*range(9))
    assert cache.admit(first)
    assert len(set(cache.pages_of(first).tolist()) - {0}) == 3
    assert cache.check([first]) == []
    cache.drop(first)
    assert cache.num_available == 10


def test_admission_leaves_the_spare_pages_alone(cache: KvCache) -> None:
    first = request(*range(9))
    assert not cache.admit(first, spare_pages=8)
    assert cache.num_available == 10
    assert cache.admit(first, spare_pages=7)
    cache.drop(first)


def test_a_retired_prefix_is_found_again_but_one_token_is_always_left(cache: KvCache) -> None:
    first = request(*range(8))
    assert cache.admit(first)
    first.computed_len = 8
    cache.retire(first)
    second, third = request(*range(8)), request(*range(8), 99)
    assert cache.admit(second)
    assert cache.admit(third)
    assert (second.cached_len, third.cached_len) == (4, 8)
    assert cache.check([second, third]) == []
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
    assert cache.check([first]) == []
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
    assert cache.check([], importing=[first]) == []
    pages = cache.quarantine(first)
    assert cache.num_available == 7
    assert cache.check([], quarantined=[pages]) == []
    cache.pool.release_quarantine(pages)
    assert cache.num_available == 10


def test_a_page_nobody_claims_is_reported_as_a_leak(cache: KvCache) -> None:
    first = request(*range(9))
    assert cache.admit(first)
    assert cache.check([]) != []
    cache.drop(first)
