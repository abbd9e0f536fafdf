from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.prefixes_in_flight import PrefixesInFlight, PrefixProducer
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

PAGE = 4


@pytest.fixture
def cache() -> KvCache:
    return KvCache(num_pages=65, page_size=PAGE, max_requests=8, max_tokens_per_request=64)


@pytest.fixture
def in_flight() -> PrefixesInFlight:
    return PrefixesInFlight(PAGE)


def request(*tokens: int, extra_key: bytes = b"") -> Request:
    return new_request(1, np.array(tokens, dtype=np.int64), SamplingParams(max_tokens=4), extra_key=extra_key)


def bring(cache: KvCache, in_flight: PrefixesInFlight, *tokens: int, extra_key: bytes = b"") -> Request:
    one = request(*tokens, extra_key=extra_key)
    assert cache.admit(one)
    in_flight.add(one)
    return one


def common_len(in_flight: PrefixesInFlight, one: Request) -> int:
    pending = in_flight.longest(one)
    return pending.num_pages * PAGE if pending else 0


def test_whole_pages_that_are_common_count(cache: KvCache, in_flight: PrefixesInFlight) -> None:
    bring(cache, in_flight, *range(12))
    assert common_len(in_flight, request(*range(12))) == 12
    assert common_len(in_flight, request(*range(11))) == 8
    assert common_len(in_flight, request(*range(13))) == 12
    assert common_len(in_flight, request(*range(6), 99, 99, 99)) == 4
    assert common_len(in_flight, request(99, *range(1, 12))) == 0
    assert common_len(in_flight, request(0, 1)) == 0


def test_namespaces_do_not_meet(cache: KvCache, in_flight: PrefixesInFlight) -> None:
    bring(cache, in_flight, *range(12), extra_key=b"one")
    assert common_len(in_flight, request(*range(13), extra_key=b"other")) == 0
    assert common_len(in_flight, request(*range(13), extra_key=b"one")) == 12


def test_of_several_the_one_that_brings_most_is_named(cache: KvCache, in_flight: PrefixesInFlight) -> None:
    bring(cache, in_flight, *range(8), 50, 51, 52, 53)
    longest = bring(cache, in_flight, *range(12))
    bring(cache, in_flight, *range(4), 60, 61, 62, 63)
    pending = in_flight.longest(request(*range(20)))
    assert pending is not None
    assert pending.producer.request is longest


@pytest.mark.parametrize("end", ["shared", "retired", "dropped", "answered"])
def test_who_has_brought_it_or_has_ended_brings_nothing_more(
    cache: KvCache, in_flight: PrefixesInFlight, end: str
) -> None:
    one = bring(cache, in_flight, *range(12))
    match end:
        case "shared":
            cache.share(one, 11)
            assert common_len(in_flight, request(*range(13))) == 12  # its last page is still to come
            cache.share(one, 12)
        case "retired":
            cache.retire(one)
        case "dropped":
            cache.drop(one)
        case "answered":
            one.has_ended = True
    assert common_len(in_flight, request(*range(13))) == 0


def test_those_that_have_ended_are_not_remembered(cache: KvCache, in_flight: PrefixesInFlight) -> None:
    for first in range(0, 4000, 4):
        cache.drop(bring(cache, in_flight, *range(first, first + 8)))
    assert len(in_flight) <= 2


def test_a_search_looks_at_few_of_many_who_bring_the_same_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KvCache(num_pages=6401, page_size=PAGE, max_requests=100, max_tokens_per_request=256)
    in_flight = PrefixesInFlight(PAGE)
    prefix = range(128)
    for number in range(100):
        bring(cache, in_flight, *prefix, *range(1000 + 200 * number, 1128 + 200 * number))
    num_asked = 0
    produces = PrefixProducer.produces

    def counted(self: PrefixProducer, num_pages: int) -> bool:
        nonlocal num_asked
        num_asked += 1
        return produces(self, num_pages)

    monkeypatch.setattr(PrefixProducer, "produces", counted)
    assert common_len(in_flight, request(*prefix, *range(500, 628))) == 128
    assert num_asked <= 6  # of 64 pages


def test_names_of_pages_go_on_when_a_request_has_grown(cache: KvCache, in_flight: PrefixesInFlight) -> None:
    one = request(*range(6))
    assert cache.admit(one)
    in_flight.add(one)
    cache.retire(one)
    one.append(6)
    one.append(7)
    assert cache.admit(one)
    in_flight.add(one)
    assert common_len(in_flight, request(*range(9))) == 8
