"""States in pages of the cache: kept behind their text, found, split off, evicted with it."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.snapshots import cuts
from diptych.engine.values.core_report import Holders
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

PAGE, PER_STATE = 4, 3
NOBODY = Holders([], [], [])
CUTS = [
    (3, 0, 0, ()),
    (4, 0, 0, ()),
    (5, 0, 0, (4,)),
    (12, 0, 0, (8,)),
    (13, 0, 8, (8, 12)),
    (13, 8, 8, (12,)),
    (13, 12, 12, ()),
]


def new_cache(num_pages: int = 40) -> KvCache:
    return KvCache(
        num_pages=num_pages, page_size=PAGE, max_requests=4, max_tokens_per_request=200, pages_per_state=PER_STATE
    )


def admitted(cache: KvCache, tokens: list[int], state_len: int = 0) -> Request:
    request = new_request(len(tokens), np.array(tokens), SamplingParams(max_tokens=1))
    request.state_len = state_len
    assert cache.admit(request)
    return request


def compute(cache: KvCache, tokens: list[int]) -> None:
    """Compute a prompt as steps do, and let it go."""
    request = admitted(cache, tokens)
    for end in request.cuts:
        cache.begin_snapshot(request, end)
        cache.release_duplicates(cache.share(request, end))
    request.computed_len = len(tokens)
    cache.retire(request)


@pytest.mark.parametrize(("num_tokens", "begun", "known", "expected"), CUTS)
def test_snapshots_stand_behind_what_others_may_have_and_before_the_end(
    num_tokens: int, begun: int, known: int, expected: tuple[int, ...]
) -> None:
    request = new_request(1, np.arange(num_tokens), SamplingParams(max_tokens=1))
    assert cuts(request, begun, known, PAGE) == expected


def test_a_prompt_begins_behind_the_longest_text_that_has_a_state() -> None:
    cache, tokens = new_cache(), list(range(30))
    compute(cache, tokens)
    request = admitted(cache, [*tokens, 99])
    assert request.cached_len == request.computed_len == 28
    assert request.state_from is not None
    assert len(request.state_from) == PER_STATE
    cache.drop(request)
    assert cache.audit(NOBODY) == []


def test_a_text_that_is_cached_without_a_state_is_computed_again_and_then_has_one() -> None:
    cache, head = new_cache(), list(range(16))
    compute(cache, [*head, 50, 51, 52, 53, 54])
    second = admitted(cache, [*head, 60, 61, 62, 63, 64])
    assert (second.cached_len, second.cuts) == (0, (16, 20))
    cache.drop(second)
    compute(cache, [*head, 60, 61, 62, 63, 64])
    third = admitted(cache, [*head, 70, 71])
    assert third.cached_len == 16
    cache.drop(third)
    assert cache.audit(NOBODY) == []


def test_what_is_evicted_gives_its_state_back() -> None:
    cache = new_cache(12)
    compute(cache, list(range(9)))
    assert cache.pool.num_free == 11 - 2 - PER_STATE
    assert cache.num_available == 11
    request = admitted(cache, list(range(100, 132)))
    assert cache.tree.num_pages <= 11 - 8
    cache.drop(request)
    assert cache.audit(NOBODY) == []


def test_a_state_that_a_peer_writes_has_pages_of_the_request_s_own() -> None:
    cache = new_cache()
    request = new_request(1, np.arange(10), SamplingParams(max_tokens=1))
    request.state_len, request.is_imported = 10, True
    assert cache.admit(request)
    granted = cache.begin_import(request)
    assert len(granted) == 3 + PER_STATE
    cache.finish_import(request)
    request.computed_len = 10
    cache.begin_from_import(request)
    assert request.state_from is not None
    assert request.state_from.tolist() == granted[-PER_STATE:].tolist()
    cache.release_duplicates(cache.read_state(request))
    assert len(cache.owned_pages(request)) == 3
    cache.retire(request)
    assert cache.audit(NOBODY) == []


def test_the_longest_request_leaves_room_for_its_state() -> None:
    assert new_cache(20).max_request_tokens == (19 - PER_STATE) * PAGE
