"""Pools that stand beside each other: who serves whom, and in which part."""

from __future__ import annotations

import pytest

from diptych.router.choose.pools import REST, choose_pool, group, grouped, meeting
from diptych.router.workers.worker_view import Pair

POOLS = {1: "old", 11: "old", 2: "next", 12: "next", 3: "", 13: "spare"}
WEIGHTS = {"old": 90.0, "next": 10.0}


@pytest.mark.parametrize(
    ("pair", "name"),
    [
        (Pair(1, 11), "old"),
        (Pair(2, 12), "next"),
        (Pair(1, 12), None),
        (Pair(2, 11), None),
        (Pair(3, 12), "next"),
        (Pair(1, 13), "old"),
        (Pair(3, 13), REST),
        (Pair(2, 2), "next"),
        (Pair(99, 11), "old"),
    ],
)
def test_a_pair_is_of_the_declared_pool_of_its_workers_and_two_never_meet(pair: Pair, name: str | None) -> None:
    assert group(pair, POOLS, WEIGHTS) == name


def test_without_declared_pools_everybody_meets() -> None:
    pairs = [Pair(1, 12), Pair(2, 11)]
    assert meeting(pairs, POOLS, {}) == tuple(pairs)
    assert meeting(pairs, POOLS, WEIGHTS) == ()
    assert grouped([Pair(1, 11), *pairs, Pair(3, 13)], POOLS, WEIGHTS) == {"old": (Pair(1, 11),), REST: (Pair(3, 13),)}


def counts(weights: dict[str, float], there: tuple[str, ...] = ("old", "next")) -> dict[str | None, int]:
    found: dict[str | None, int] = {}
    for number in range(4000):
        pool = choose_pool(there, weights, f"request-{number}")
        found[pool] = found.get(pool, 0) + 1
    return found


@pytest.mark.parametrize(("share", "of"), [(5.0, 100.0), (1.0, 2.0), (30.0, 100.0)])
def test_a_pool_gets_its_part_of_the_requests(share: float, of: float) -> None:
    assert counts({"old": of - share, "next": share})["next"] == pytest.approx(4000 * share / of, rel=0.15)


def test_a_pool_of_weight_0_gets_none_and_one_that_has_no_pair_gives_its_part_away() -> None:
    assert counts({"old": 1.0, "next": 0.0}) == {"old": 4000}
    assert counts(WEIGHTS, ("next",)) == {"next": 4000}
    assert counts({"old": 1.0, "next": 0.0}, ("next",)) == {None: 4000}
    assert counts(WEIGHTS, (REST,)) == {REST: 4000}
    assert REST not in counts(WEIGHTS, ("old", REST))


def test_when_a_weight_grows_only_those_move_that_now_belong_there() -> None:
    keys = [f"session-{number}" for number in range(2000)]
    before = {key: choose_pool(("a", "b", "c"), {"a": 60.0, "b": 30.0, "c": 10.0}, key) for key in keys}
    after = {key: choose_pool(("a", "b", "c"), {"a": 60.0, "b": 30.0, "c": 50.0}, key) for key in keys}
    moved = {after[key] for key in keys if before[key] != after[key]}
    assert moved == {"c"}
