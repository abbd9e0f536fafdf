from __future__ import annotations

import numpy as np
from flat_request import flat_request

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.decode_batch import DecodeBatch
from diptych.engine.values.core_report import Holders
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

PAGE = 4


def running(
    cache: KvCache, batch: DecodeBatch, room: int, num_output_tokens: int, priority: int = 0, max_tokens: int = 100
) -> Request:
    """A request of 4 prompt tokens and some output, the last of which has no KV yet."""
    params = SamplingParams(max_tokens=max_tokens)
    request = flat_request(room, np.arange(4) + 10 * room, params, priority=priority)
    for token_id in range(num_output_tokens - 1):
        request.append(token_id)
    assert cache.admit(request)
    request.computed_len = request.num_tokens
    request.append(77)
    batch.add(request)
    return request


def new_cache(num_pages: int) -> KvCache:
    return KvCache(num_pages=num_pages, page_size=PAGE, max_requests=4, max_tokens_per_request=64)


def test_every_request_has_a_slot_for_its_next_token_after_make_room() -> None:
    cache = new_cache(9)
    batch = DecodeBatch(cache)
    request = running(cache, batch, 1, num_output_tokens=5)
    assert batch.due() == [request]
    assert batch.make_room([request])
    assert request.num_pages == 3


def test_too_few_pages_are_reported_and_nothing_is_lost() -> None:
    cache = new_cache(6)
    batch = DecodeBatch(cache)
    requests = [running(cache, batch, 1, 9), running(cache, batch, 2, 5)]
    assert not batch.make_room(batch.due())
    assert cache.audit(Holders(requests)) == []


def test_the_request_with_the_least_progress_makes_room() -> None:
    batch = DecodeBatch(cache := new_cache(9))
    running(cache, batch, 1, 9)
    running(cache, batch, 2, 5)
    assert batch.victim().room == 2


def test_a_request_of_lower_priority_makes_room_first() -> None:
    batch = DecodeBatch(cache := new_cache(9))
    running(cache, batch, 1, 9, priority=-1)
    running(cache, batch, 2, 5)
    assert batch.victim().room == 1


def test_a_request_that_ends_with_a_token_on_its_way_is_not_due() -> None:
    batch = DecodeBatch(cache := new_cache(9))
    ending, going_on = running(cache, batch, 1, 4, max_tokens=5), running(cache, batch, 2, 4, max_tokens=6)
    for request in (ending, going_on):
        request.computed_len += 1
    assert batch.due() == [going_on]


def test_a_room_is_not_confused_with_another_request_of_its_number() -> None:
    batch = DecodeBatch(cache := new_cache(9))
    request = running(cache, batch, 1, 1)
    other = new_request(1, np.arange(4), SamplingParams())
    assert (request in batch, other in batch) == (True, False)
