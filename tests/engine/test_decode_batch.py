from __future__ import annotations

import numpy as np

from diptych.engine.decode_batch import DecodeBatch
from diptych.engine.kv_cache import KvCache
from diptych.engine.request import Request, new_request
from diptych.engine.sampling_params import SamplingParams

PAGE = 4


def running(cache: KvCache, batch: DecodeBatch, room: int, num_output_tokens: int) -> Request:
    """A request of 4 prompt tokens and some output, which fills its pages exactly."""
    request = new_request(room, np.arange(4) + 10 * room, SamplingParams(max_tokens=100))
    for token_id in range(num_output_tokens):
        request.append(token_id)
    assert cache.admit(request)
    request.computed_len = request.num_tokens
    batch.add(request)
    return request


def test_every_request_has_a_slot_for_its_next_token_after_make_room() -> None:
    cache = KvCache(num_pages=9, page_size=PAGE, max_requests=4, max_tokens_per_request=64)
    batch = DecodeBatch(cache)
    request = running(cache, batch, 1, num_output_tokens=4)
    request.append(77)
    assert batch.make_room() == []
    assert request.num_pages == 3


def test_the_request_with_the_least_progress_makes_room() -> None:
    cache = KvCache(num_pages=6, page_size=PAGE, max_requests=4, max_tokens_per_request=64)
    batch = DecodeBatch(cache)
    long, short = running(cache, batch, 1, 8), running(cache, batch, 2, 4)
    for request in (long, short):
        request.append(77)
    assert [request.room for request in batch.make_room()] == [2]
    assert [request.room for request in batch] == [1]
    assert long.num_pages == 4
    assert cache.check([long]) == []


def test_a_lone_request_that_finds_no_page_is_retracted_itself() -> None:
    cache = KvCache(num_pages=3, page_size=PAGE, max_requests=4, max_tokens_per_request=64)
    batch = DecodeBatch(cache)
    running(cache, batch, 1, 4).append(77)
    assert [request.room for request in batch.make_room()] == [1]
    assert len(batch) == 0
    assert cache.check([]) == []


def test_commit_counts_one_computed_token_each_in_batch_order() -> None:
    cache = KvCache(num_pages=9, page_size=PAGE, max_requests=4, max_tokens_per_request=64)
    batch = DecodeBatch(cache)
    for room in (3, 1, 2):
        running(cache, batch, room, 0)
    assert [(request.room, request.computed_len) for request in batch.commit()] == [(3, 5), (1, 5), (2, 5)]
