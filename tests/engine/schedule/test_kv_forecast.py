from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.kv_forecast import KvForecast, peak_growth
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

PAGE = 4


def peak(*requests: tuple[int, int]) -> int:
    owned, remaining = np.array(requests, dtype=np.int64).reshape(-1, 2).T
    return peak_growth(owned, remaining, PAGE)


def test_a_lone_request_grows_to_its_end() -> None:
    assert peak((3, 9)) == 3


def test_nobody_needs_nothing() -> None:
    assert peak() == 0


def test_what_ends_early_pays_for_what_grows_on() -> None:
    assert peak((10, 4), (1, 40)) == 2
    assert peak((1, 4), (1, 40)) == 9


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=12))
def test_the_peak_is_never_below_what_a_simulation_needs(requests: list[tuple[int, int]]) -> None:
    """Each grows by one token a step, a page when it needs one, and leaves at its end with all its pages."""
    pages, foreseen = 0, peak(*requests)
    for step in range(1, 41):
        for owned, remaining in requests:
            pages += (step - 1) % PAGE == 0 and step <= remaining
            if step - 1 == remaining:
                pages -= owned + -(-remaining // PAGE)
        assert pages <= foreseen


def admitted(cache: KvCache, room: int, max_tokens: int) -> Request:
    request = new_request(room, np.arange(8) + 100 * room, SamplingParams(max_tokens=max_tokens))
    assert cache.admit(request)
    return request


def test_pages_are_spared_for_what_runs_and_none_for_a_request_alone() -> None:
    cache = KvCache(num_pages=65, page_size=PAGE, max_requests=4, max_tokens_per_request=128)
    forecast = KvForecast(cache)
    candidate = new_request(9, np.arange(8), SamplingParams(max_tokens=4))
    assert forecast.spare_pages([], candidate) == 0
    assert forecast.spare_pages([admitted(cache, 1, 16)], candidate) == 4 - 2
    assert forecast.spare_pages([admitted(cache, 2, 16), admitted(cache, 3, 16)], candidate) == 8 - 2


def test_outputs_that_were_short_make_room_for_more() -> None:
    cache = KvCache(num_pages=65, page_size=PAGE, max_requests=4, max_tokens_per_request=128)
    forecast = KvForecast(cache)
    holder, candidate = admitted(cache, 1, 100), new_request(9, np.arange(8), SamplingParams(max_tokens=100))
    before = forecast.spare_pages([holder], candidate)
    ended = new_request(5, np.arange(8), SamplingParams(max_tokens=100))
    ended.append(1)
    for _ in range(20):
        forecast.learn(ended)
    assert forecast.spare_pages([holder], candidate) < before


def test_requests_without_text_say_nothing_of_outputs() -> None:
    forecast = KvForecast(KvCache(num_pages=65, page_size=PAGE, max_requests=4, max_tokens_per_request=128))
    text = new_request(1, np.arange(8), SamplingParams(max_tokens=500))
    for token_id in range(400):
        text.append(token_id)
    for _ in range(20):
        forecast.learn(text)
    made, limit = np.array([0]), np.array([500])
    before = forecast.lengths.remaining(made, limit)
    labelled = new_request(2, np.arange(8), SamplingParams(max_tokens=1), labels=(5, 9))
    labelled.append(1)
    labelled.vector = np.zeros(2, np.float32)
    for _ in range(1000):
        forecast.learn(labelled)
    assert forecast.lengths.remaining(made, limit) == before >= 400
