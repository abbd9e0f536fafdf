from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.extend_queue import Chunk, ExtendQueue
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Scheduling
from diptych.engine.request import Request, new_request
from diptych.engine.sampling_params import SamplingParams
from diptych.engine.waiting_queue import new_waiting_queue

PAGE = 4


def request(room: int, length: int) -> Request:
    return new_request(room, np.arange(length) + 100 * room, SamplingParams(max_tokens=4))


@pytest.fixture
def cache() -> KvCache:
    return KvCache(num_pages=17, page_size=PAGE, max_requests=8, max_tokens_per_request=64)


@pytest.fixture
def queue(cache: KvCache) -> ExtendQueue:
    return ExtendQueue(cache, new_waiting_queue(cache, Scheduling()), max_step_tokens=10, max_batch_size=3)


def chunk_sizes(chunks: list[Chunk]) -> dict[int, int]:
    return {chunk.request.room: chunk.num_tokens for chunk in chunks}


def test_requests_share_a_step_up_to_the_token_budget(queue: ExtendQueue) -> None:
    for room, length in ((1, 4), (2, 5), (3, 9)):
        queue.add(request(room, length))
    chunks = queue.plan(0.0)
    assert chunk_sizes(chunks) == {1: 4, 2: 5, 3: 1}
    assert [done.room for done in queue.commit(chunks)] == [1, 2]
    assert queue.waiting_tokens == 8


def test_a_chunked_request_goes_on_before_new_ones_start(queue: ExtendQueue) -> None:
    queue.add(request(1, 15))
    queue.commit(queue.plan(0.0))
    queue.add(request(2, 3))
    assert chunk_sizes(queue.plan(0.0)) == {1: 5, 2: 3}


def test_a_request_that_does_not_fit_holds_back_those_behind_it(queue: ExtendQueue) -> None:
    queue.add(request(1, 40))
    queue.add(request(2, 30))
    queue.add(request(3, 1))
    assert chunk_sizes(queue.plan(0.0)) == {1: 10}
    queue.commit([Chunk(queue.admitted[0], 40)])
    assert queue.plan(0.0) == []
    assert len(queue) == 2


def test_a_step_takes_no_more_requests_than_allowed(queue: ExtendQueue) -> None:
    for room in range(1, 6):
        queue.add(request(room, 1))
    assert chunk_sizes(queue.plan(0.0)) == {1: 1, 2: 1, 3: 1}


def test_a_retracted_request_goes_first(queue: ExtendQueue) -> None:
    queue.add(request(1, 6))
    queue.add_first(request(2, 6))
    assert chunk_sizes(queue.plan(0.0)) == {2: 6, 1: 4}


def test_waiting_and_extending_requests_can_be_taken_out(queue: ExtendQueue, cache: KvCache) -> None:
    first, second = request(1, 15), request(2, 3)
    queue.add(first)
    queue.add(second)
    queue.commit(queue.plan(0.0))
    queue.remove(second)
    queue.remove(first)
    cache.drop(first)
    assert len(queue) == 0
    assert cache.check([]) == []
