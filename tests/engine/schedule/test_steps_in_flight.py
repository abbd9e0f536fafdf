from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.steps_in_flight import StepsInFlight
from diptych.engine.values.core_report import Holders
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import new_step, next_chunk
from diptych.generation.sampling_params import SamplingParams

PAGE = 4


@pytest.fixture
def cache() -> KvCache:
    return KvCache(num_pages=17, page_size=PAGE, max_requests=8, max_tokens_per_request=64)


@pytest.fixture
def steps(cache: KvCache) -> StepsInFlight:
    return StepsInFlight(cache)


def admitted(cache: KvCache, room: int, length: int = 6) -> Request:
    request = new_request(room, np.arange(length) + 100 * room, SamplingParams(max_tokens=4))
    assert cache.admit(request)
    return request


def launch_prompt(steps: StepsInFlight, request: Request) -> None:
    steps.launch(new_step((), [next_chunk(request, 100)]))


def launch_decode(steps: StepsInFlight, request: Request) -> None:
    steps.launch(new_step([request], ()))


def test_launched_tokens_count_as_computed(cache: KvCache, steps: StepsInFlight) -> None:
    request = admitted(cache, 1)
    launch_prompt(steps, request)
    launch_decode(steps, request)
    assert request.computed_len == 7


def test_pages_are_given_back_at_once_when_no_step_touches_them(cache: KvCache, steps: StepsInFlight) -> None:
    request, other = admitted(cache, 1), admitted(cache, 2)
    launch_prompt(steps, other)
    steps.drop(request)
    assert cache.audit(Holders([other])) == []


def test_pages_stay_until_the_last_step_that_touches_them(cache: KvCache, steps: StepsInFlight) -> None:
    request = admitted(cache, 1)
    launch_prompt(steps, request)
    launch_decode(steps, request)
    steps.commit()
    request.append(5)
    steps.retire(request)
    assert steps.leaving == [request]
    assert cache.audit(Holders([request])) == []
    steps.commit()
    assert steps.leaving == []
    assert cache.audit(Holders()) == []
    assert cache.tree.num_pages == 1


def test_unknown_tokens_are_found_among_the_samples_of_the_newest_step(cache: KvCache, steps: StepsInFlight) -> None:
    first, second, third = (admitted(cache, room) for room in (1, 2, 3))
    assert steps.samples() == {}
    steps.launch(new_step([first], [next_chunk(second, 2), next_chunk(third, 100)]))
    assert steps.samples() == {1: 0, 3: 1}


def test_a_copy_of_a_shared_prefix_stays_until_the_last_step_that_reads_it(
    cache: KvCache, steps: StepsInFlight
) -> None:
    first, second = (new_request(room, np.arange(6), SamplingParams(max_tokens=4)) for room in (1, 2))
    for twin in (first, second):
        assert cache.admit(twin)
        launch_prompt(steps, twin)
    steps.commit()
    steps.share(first, 6)
    launch_decode(steps, second)
    steps.commit()
    num_free = cache.pool.num_free
    steps.share(second, 6)
    assert cache.pages_of(second)[0] == cache.pages_of(first)[0]
    assert cache.pool.num_free == num_free  # the step that decodes still reads its own copy
    steps.commit()
    assert cache.pool.num_free == num_free + 1
    assert cache.audit(Holders([first, second])) == []
