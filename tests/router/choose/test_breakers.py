from __future__ import annotations

import random

import pytest

from diptych.router.choose.breakers import FIRST_PAUSE_S, MAX_PAUSE_S, MEMORY_S, Breakers, suspects_of
from diptych.router.workers.worker_view import Pair

P1, P2, D1, D2 = 1, 2, 11, 12
PAIRS = [Pair(P1, D1), Pair(P1, D2), Pair(P2, D1), Pair(P2, D2)]
WITHOUT_D1 = [Pair(P1, D2), Pair(P2, D2)]


def fail(breakers: Breakers, *suspects: int | Pair, times: int = 3, now_s: float = 0.0) -> None:
    for _ in range(times):
        breakers.fail(suspects, now_s)


def test_failures_in_a_row_open_a_breaker() -> None:
    breakers = Breakers(3)
    assert [breakers.fail([D1], 0.0) for _ in range(2)] == [[], []]
    assert breakers.choose(PAIRS, 0.0) == PAIRS
    assert breakers.fail([D1], 0.0) == [D1]
    assert breakers.choose(PAIRS, 0.5) == WITHOUT_D1
    assert breakers.choose(PAIRS, FIRST_PAUSE_S) == PAIRS


def test_a_success_ends_the_row() -> None:
    breakers = Breakers(3)
    for _ in range(5):
        fail(breakers, D1, times=2)
        breakers.succeed(Pair(P1, D1))
    assert breakers.choose(PAIRS, 0.0) == PAIRS


def test_failures_far_apart_are_no_row() -> None:
    breakers = Breakers(2)
    fail(breakers, D1, times=1)
    fail(breakers, D1, times=1, now_s=MEMORY_S + 1)
    assert breakers.opened(MEMORY_S + 1) == set()


def test_one_request_tries_when_the_pause_is_over() -> None:
    breakers = Breakers(3)
    fail(breakers, D1)
    breakers.begin(Pair(P1, D1), 1.0)
    assert breakers.choose(PAIRS, 1.0) == WITHOUT_D1
    breakers.succeed(Pair(P2, D1))
    assert (breakers.choose(PAIRS, 1.0), breakers.opened(1.0)) == (PAIRS, set())


def test_a_try_that_fails_doubles_the_pause() -> None:
    breakers, now_s, pauses = Breakers(3), 0.0, []
    fail(breakers, D1)
    for _ in range(7):
        begun_s = now_s
        while breakers.opened(now_s):
            now_s += 0.25
        pauses.append(now_s - begun_s)
        breakers.begin(Pair(P2, D1), now_s)
        fail(breakers, D1, times=1, now_s=now_s)
    assert pauses == [FIRST_PAUSE_S, 2, 4, 8, 16, MAX_PAUSE_S, MAX_PAUSE_S]


def test_a_try_that_says_nothing_is_followed_by_another() -> None:
    breakers = Breakers(3)
    fail(breakers, D1)
    breakers.begin(Pair(P1, D1), 1.0)
    assert (breakers.opened(1.5), breakers.opened(2.0)) == ({D1}, set())


def test_what_began_before_a_breaker_opened_changes_it_no_more() -> None:
    breakers = Breakers(3)
    fail(breakers, D1, times=9)
    breakers.succeed(Pair(P1, D1))
    assert (breakers.opened(0.9), breakers.opened(1.0)) == ({D1}, set())


def test_the_last_worker_of_a_role_is_never_left_alone() -> None:
    breakers = Breakers(3)
    fail(breakers, D1, D2)
    assert breakers.choose(PAIRS, 0.0) == PAIRS
    fail(breakers, P1)
    assert breakers.choose(PAIRS, 0.0) == [Pair(P2, D1), Pair(P2, D2)]
    assert breakers.choose([Pair(P1, D1)], 0.0) == [Pair(P1, D1)]
    assert breakers.choose([], 0.0) == []


def test_a_bad_link_is_avoided_and_its_workers_are_not() -> None:
    breakers = Breakers(3)
    for _ in range(3):
        fail(breakers, P1, D1, Pair(P1, D1), times=1)
        breakers.succeed(Pair(P1, D2))
        breakers.succeed(Pair(P2, D1))
    assert breakers.choose(PAIRS, 0.0) == PAIRS[1:]


def test_a_unified_worker_alone_is_one_suspect() -> None:
    breakers = Breakers(1)
    fail(breakers, 21, times=1)
    assert breakers.choose([Pair(21, 21), Pair(P1, D1)], 0.0) == [Pair(P1, D1)]


def test_without_a_limit_nothing_opens() -> None:
    breakers = Breakers(0)
    fail(breakers, D1, times=99)
    assert breakers.choose(PAIRS, 0.0) == PAIRS


@pytest.mark.parametrize("seed", range(5))
def test_the_worker_at_fault_opens_first_though_every_failure_blames_its_peer_too(seed: int) -> None:
    """Pairs are drawn at random, D1 damages what it gets, and the router can't tell whose fault it is."""
    rng, breakers, served = random.Random(seed), Breakers(5), []
    for number in range(200):
        now_s = number * 0.01
        pair = rng.choice(breakers.choose(PAIRS, now_s))
        breakers.begin(pair, now_s)
        if pair.decode_id == D1:
            fail(breakers, *suspects_of(pair), times=1, now_s=now_s)
        else:
            breakers.succeed(pair)
        served.append(pair)
        assert not {P1, P2, D2} & set(breakers.opened(now_s))
    assert sum(pair.decode_id == D1 for pair in served[20:]) <= 2


def test_what_is_left_alone_says_for_how_long_and_why() -> None:
    breakers = Breakers(3)
    fail(breakers, D1)
    fail(breakers, P1, times=2)
    assert {suspect: str(pause) for suspect, pause in breakers.pauses(0.25).items()} == {
        D1: "left alone for 1 s more: 3 requests in a row failed"
    }
    assert breakers.pauses(FIRST_PAUSE_S) == {}
