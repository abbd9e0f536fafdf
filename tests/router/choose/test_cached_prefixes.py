from __future__ import annotations

import pytest

from diptych.router.choose.cached_prefixes import LATELY_S, ApproximateIndex, CachedPrefixes
from diptych.router.choose.prefix_index import KvNews, PrefixIndex

CHAINS = {16: [10, 11, 12], 64: [20]}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prefixes(clock: Clock) -> CachedPrefixes:
    return CachedPrefixes(PrefixIndex(), ApproximateIndex(clock), ApproximateIndex(clock, LATELY_S))


def test_a_silent_worker_has_what_was_sent_to_it(prefixes: CachedPrefixes) -> None:
    prefixes.sent([1, 2], CHAINS)
    assert prefixes.cached_tokens(CHAINS) == {1: 64, 2: 64}
    assert prefixes.cached_tokens({16: [10, 11, 13]}) == {1: 32, 2: 32}


def test_a_worker_that_tells_has_what_it_told_and_what_was_sent_lately(prefixes: CachedPrefixes, clock: Clock) -> None:
    prefixes.told.apply(1, KvNews(1, cleared=True, stored=[10]))
    prefixes.sent([1, 2], CHAINS)
    assert prefixes.cached_tokens(CHAINS) == {1: 64, 2: 64}
    clock.now_s = LATELY_S
    assert prefixes.cached_tokens(CHAINS) == {1: 16, 2: 64}


def test_nothing_is_guessed_of_a_worker_that_is_gone(prefixes: CachedPrefixes) -> None:
    prefixes.told.apply(1, KvNews(1, cleared=True))
    prefixes.sent([1, 2], CHAINS)
    for instance_id in (1, 2):
        prefixes.forget(instance_id)
    assert prefixes.cached_tokens(CHAINS) == {}
    assert prefixes.nbytes == prefixes.told.nbytes


def test_a_guess_ends_when_the_worker_tells(prefixes: CachedPrefixes) -> None:
    prefixes.sent([1], CHAINS)
    prefixes.told.apply(1, KvNews(1, cleared=True, more=True))
    assert prefixes.cached_tokens(CHAINS) == {1: 64}
    prefixes.told.apply(1, KvNews(2))
    assert prefixes.cached_tokens(CHAINS) == {}
