"""States in pages of the cache: kept behind their text, found, split off, evicted with it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.snapshots import cuts
from diptych.engine.values.core_report import Holders
from diptych.engine.values.policy_names import EvictionPolicy
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


def admitted(cache: KvCache, tokens: list[int], state_len: int = 0, extra_key: bytes = b"") -> Request:
    request = new_request(len(tokens), np.array(tokens), SamplingParams(max_tokens=1), extra_key=extra_key)
    request.state_len = state_len
    assert cache.admit(request)
    return request


def compute(cache: KvCache, tokens: list[int], state_len: int = 0) -> None:
    """Compute a prompt as steps do, and let it go."""
    request = admitted(cache, tokens, state_len)
    for end in request.cuts:
        cache.begin_snapshot(request, end)
        cache.release_duplicates(cache.share(request, end))
    request.computed_len = len(tokens)
    cache.retire(request)


@pytest.mark.parametrize(("num_tokens", "begun", "parting", "expected"), CUTS)
def test_snapshots_stand_behind_what_others_may_have_and_before_the_end(
    num_tokens: int, begun: int, parting: int, expected: tuple[int, ...]
) -> None:
    request = new_request(1, np.arange(num_tokens), SamplingParams(max_tokens=1))
    assert cuts(request, begun, parting, PAGE) == expected


def test_with_a_store_one_more_stands_behind_the_last_run_before_each() -> None:
    request = new_request(1, np.arange(45), SamplingParams(max_tokens=1))
    assert cuts(request, 0, 20, PAGE, run_tokens=16) == (16, 20, 32, 44)
    assert cuts(request, 36, 36, PAGE, run_tokens=16) == (44,), "not where the request has begun further on"


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


def test_a_prompt_that_only_goes_on_where_a_text_ended_marks_nothing_there() -> None:
    cache, head = new_cache(), list(range(16))
    compute(cache, head)
    second = admitted(cache, [*head, 60, 61, 62, 63, 64])
    assert (second.cached_len, second.cuts) == (12, (20,))
    cache.drop(second)
    assert cache.audit(NOBODY) == []


def found(cache: KvCache, tokens: list[int]) -> int:
    """How many tokens of a prompt that begins so need not be computed."""
    return cache.cached_len(new_request(1, np.array([*tokens, -1]), SamplingParams(max_tokens=1)))


def make_room(cache: KvCache, num_pages: int) -> None:
    """Have so many pages evicted."""
    taken = [-1 - each for each in range((cache.pool.num_free + num_pages) * PAGE)]
    cache.drop(admitted(cache, taken))
    assert cache.audit(NOBODY) == []


def test_the_state_behind_an_earlier_turn_goes_before_any_text() -> None:
    cache, other, turn = new_cache(), list(range(50, 63)), list(range(13))
    compute(cache, other)
    compute(cache, turn)
    compute(cache, [*turn, 20, 21, 22, 23, 24, 25])
    num_pages = cache.tree.num_pages
    make_room(cache, 1)
    assert cache.tree.num_pages == num_pages - PER_STATE
    assert found(cache, other) == 12
    assert found(cache, [*turn, 20, 21, 22, 23, 24, 25]) == 16
    assert found(cache, turn) == 0


def test_the_state_where_texts_part_is_as_good_as_its_text() -> None:
    cache, turn = new_cache(), list(range(13))
    compute(cache, turn)
    compute(cache, [*turn, 20, 21, 22, 23])
    compute(cache, [*turn, 30, 31, 32, 33])
    make_room(cache, 1)
    assert found(cache, turn) == 12
    assert found(cache, [*turn, 20, 21, 22, 23]) + found(cache, [*turn, 30, 31, 32, 33]) == 16 + 12


def test_a_short_text_with_a_state_goes_before_a_long_one() -> None:
    cache, long, short = new_cache(), list(range(49)), list(range(100, 109))
    compute(cache, long)
    compute(cache, short)
    make_room(cache, 1)
    assert (found(cache, long), found(cache, short)) == (48, 0)


def test_a_conversation_that_has_gone_on_stays_for_longer_than_one_that_has_begun() -> None:
    cache, turn, begun = new_cache(), list(range(13)), list(range(100, 121))
    compute(cache, turn)
    compute(cache, [*turn, *range(20, 28)])
    compute(cache, begun)
    make_room(cache, PER_STATE + 1)
    assert (found(cache, [*turn, *range(20, 28)]), found(cache, begun)) == (20, 0)


def test_what_was_worth_more_once_goes_in_its_turn() -> None:
    cache, long = new_cache(), list(range(49))
    compute(cache, long)
    for each in range(40):
        compute(cache, list(range(1000 * each + 1000, 1000 * each + 1009)))
    assert found(cache, long) < 48
    assert found(cache, list(range(40000, 40009))) == 8


def test_a_long_text_s_earlier_state_goes_behind_a_short_text() -> None:
    cache, turn, short = new_cache(60), list(range(101)), list(range(200, 205))
    compute(cache, turn)
    compute(cache, [*turn, 120, 121, 122, 123])
    compute(cache, short)
    make_room(cache, 1)
    assert (found(cache, turn), found(cache, short)) == (100, 0)


def test_text_behind_which_nobody_can_begin_goes_first() -> None:
    cache, prompt, other = new_cache(), list(range(13)), list(range(50, 63))
    compute(cache, other)
    request = new_request(1, np.array(prompt), SamplingParams(max_tokens=10))
    assert cache.admit(request)
    cache.begin_snapshot(request, 12)
    cache.share(request, 12)
    for token_id in range(20, 30):
        request.append(token_id)
    assert cache.grow(request, request.num_tokens)
    request.computed_len = request.num_tokens - 1
    cache.retire(request)
    make_room(cache, 2)
    assert (found(cache, prompt), found(cache, other)) == (12, 12)


def test_a_text_that_is_split_between_states_goes_before_the_text_above_it() -> None:
    cache, text = new_cache(16), list(range(17))
    request = admitted(cache, text)
    cache.share(request, 8)
    cache.share(request, 16)
    cache.drop(request)
    second = admitted(cache, [*text[:12], 70, 71, 72, 73, 74])
    assert second.cached_len == 0
    cache.drop(second)
    cache.pool.uncache(cache.tree.evict(2).pages)
    assert cache.audit(NOBODY) == []


def test_a_state_is_not_superseded_any_more_when_the_next_one_is_gone() -> None:
    cache, turn = new_cache(), list(range(13))
    compute(cache, turn)
    compute(cache, [*turn, 20, 21, 22, 23])
    cache.tree.evict(PER_STATE + 1)  # the first turn's, and the end of the second
    assert found(cache, [*turn, 20, 21, 22, 23]) == 0
    assert cache.tree.check() == []


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("seed", range(4))
def test_no_page_is_lost_whatever_runs_beside_what(seed: int, policy: EvictionPolicy) -> None:
    rng, running = random.Random(seed), list[tuple[Request, list[int]]]()
    cache = KvCache(
        num_pages=50,
        page_size=PAGE,
        max_requests=4,
        max_tokens_per_request=80,
        eviction_policy=policy,
        pages_per_state=PER_STATE,
    )
    for room in range(400):
        text = [each for _ in range(8) for each in [rng.randrange(2)] * 2 * PAGE][: rng.randrange(2, 60)]
        request = new_request(room, np.array(text), SamplingParams(max_tokens=1))
        if cache.admit(request):
            running.append((request, sorted({*request.cuts, *range(2 * PAGE, len(text), 2 * PAGE)})))
        while running and (len(running) == 4 or rng.random() < 0.7):
            go_on(cache, running, rng)
        held = [request for request, _ in running]
        assert cache.audit(Holders(held, [], [])) == []


def go_on(cache: KvCache, running: list[tuple[Request, list[int]]], rng: random.Random) -> None:
    """Let one request compute a chunk, or end."""
    request, ends = running[at := rng.randrange(len(running))]
    if not ends or rng.random() < 0.1:
        del running[at]
        (cache.drop if rng.random() < 0.3 else cache.retire)(request)
    elif (end := ends.pop(0)) > request.computed_len:
        if end in request.cuts:
            cache.begin_snapshot(request, end)
        request.computed_len = end
        cache.release_duplicates(cache.share(request, end))


def test_a_prompt_that_is_cached_whole_begins_with_a_state_before_its_last_token() -> None:
    cache, tokens = new_cache(), list(range(30))
    compute(cache, tokens[:17])  # whose state is behind 16 tokens
    found = []
    for end in (16, 17):
        request = admitted(cache, tokens[:end])
        found.append((request.cached_len, request.cuts))
        cache.drop(request)
    assert found == [(0, (12,)), (16, ())]
    compute(cache, tokens[:16])
    request = admitted(cache, tokens[:16])
    assert (request.cached_len, request.extend_len) == (12, 4)
    cache.drop(request)
    assert cache.audit(NOBODY) == []


def test_namespaces_share_no_state() -> None:
    cache, tokens = new_cache(), list(range(30))
    compute(cache, tokens)
    for extra_key, cached_len in ((b"salt", 0), (b"", 28)):
        request = admitted(cache, tokens, extra_key=extra_key)
        assert request.cached_len == cached_len
        cache.drop(request)


def test_what_is_evicted_gives_its_state_back() -> None:
    cache = new_cache(14)
    compute(cache, list(range(9)))
    compute(cache, list(range(50, 59)))
    assert cache.pool.num_free == 13 - 2 * (2 + PER_STATE)
    assert cache.num_available == 13
    request = admitted(cache, list(range(100, 128)))
    assert cache.tree.num_pages <= 13 - 7
    cache.drop(request)
    assert cache.audit(NOBODY) == []


def test_text_without_a_state_that_prompts_leave_in_its_middle_is_evicted_from_its_end() -> None:
    cache, tokens = new_cache(60), list(range(60))
    request = admitted(cache, tokens[:40])
    cache.begin_snapshot(request, 36)
    cache.release_duplicates(cache.share(request, 36))
    assert cache.grow(request, 60)
    request.tokens, request.num_tokens, request.computed_len = np.array(tokens), 60, 60  # with its output
    cache.retire(request)
    for end in (44, 52):
        cache.drop(admitted(cache, [*tokens[:end], 99]))
        assert cache.audit(NOBODY) == []
    while cache.tree.num_evictable:
        cache.pool.uncache(cache.tree.evict(1).pages)
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


def test_the_longest_request_leaves_room_for_the_states_that_it_begins_and_ends_with() -> None:
    cache = new_cache(20)
    longest = cache.max_request_tokens
    assert longest == (19 - 2 * PER_STATE) * PAGE
    compute(cache, list(range(longest)))
    cache.drop(admitted(cache, list(range(longest)), state_len=longest))
    assert cache.audit(NOBODY) == []


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_the_states_of_former_turns_keep_no_later_one_out(is_handed_over: bool) -> None:
    cache = new_cache(30)
    for end in range(1, cache.max_request_tokens, 5):
        compute(cache, list(range(end)), end if is_handed_over else 0)
        assert cache.audit(NOBODY) == []


def test_a_state_is_kept_while_it_is_to_be_read_and_goes_before_a_request_has_to() -> None:
    cache = new_cache(15)
    compute(cache, list(range(9)))
    request, other = admitted(cache, [*range(9), 50]), admitted(cache, list(range(100, 125)))
    assert request.node is not None
    assert request.node.state is not None
    assert cache.num_available == cache.pool.num_free == 14 - 3 - PER_STATE - 7
    assert cache.audit(Holders([request, other], [], [])) == []
    request.computed_len = 10
    cache.release_duplicates(cache.share(request, 10))  # the step that read it is over
    assert cache.num_available == PER_STATE + 1
    assert cache.grow(request, 10 + 4 * cache.num_available)
    assert request.node.state is None
    assert cache.audit(Holders([request, other], [], [])) == []
    cache.drop(request)
    cache.drop(other)
    assert cache.audit(NOBODY) == []


def test_requests_that_begin_with_one_state_keep_it_until_the_last_has_read_it() -> None:
    cache = new_cache(30)
    compute(cache, list(range(9)))
    requests = [admitted(cache, [*range(9), last]) for last in (50, 51, 52)]
    free = cache.num_available
    cache.drop(requests.pop())
    assert cache.num_available == free + 1
    cache.release_duplicates(cache.share(requests[0], 9))
    assert cache.num_available == free + 1
    cache.release_duplicates(cache.share(requests[1], 9))
    assert cache.num_available == free + 1 + PER_STATE
    assert cache.audit(Holders(requests, [], [])) == []


def test_what_is_not_to_be_trusted_leaves_no_state_for_others() -> None:
    cache = new_cache()
    compute(cache, list(range(9)))
    request = admitted(cache, [*range(9), 50])
    assert request.cached_len == 8
    cache.distrust(request)
    other = admitted(cache, [*range(9), 60])
    assert (other.cached_len, other.cuts) == (0, (8,))
    assert cache.audit(Holders([request, other], [], [])) == []
    cache.drop(request)
    cache.drop(other)
    assert cache.audit(NOBODY) == []
    assert cache.pool.num_free == cache.pool.capacity


def test_what_is_cleared_takes_its_states_with_it_but_for_those_that_are_to_be_read() -> None:
    cache = new_cache()
    compute(cache, list(range(9)))
    compute(cache, list(range(50, 70)))
    request = admitted(cache, [*range(9), 50])
    cache.clear()
    assert cache.audit(Holders([request], [], [])) == []
    assert cache.pool.num_free == cache.pool.capacity - 3 - PER_STATE
    cache.drop(request)
    cache.clear()
    assert cache.pool.num_free == cache.pool.capacity
