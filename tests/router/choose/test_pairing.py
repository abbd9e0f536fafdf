from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.common.members.terms import Feature, Terms, bits
from diptych.router.choose.pairing import (
    explain,
    has_fresh,
    heard,
    is_missing,
    least_blamed,
    pair_up,
    successions,
    vacating,
)
from diptych.router.workers.worker_view import Pair, WorkerView

TERMS = Terms(weights="w", oldest_protocol=2, newest_protocol=2, features=bits(Feature.MOVE))


def worker(instance_id: int, role: Role, *linked: int) -> WorkerView:
    return WorkerView(instance_id, role, State.READY, "m", TERMS, session_open=True, linked=frozenset(linked))


U1, U2 = worker(21, Role.UNIFIED, 1, 11, 22), worker(22, Role.UNIFIED, 21)
P1, P2 = worker(1, Role.PREFILL, 11, 12), worker(2, Role.PREFILL, 11, 12)
D1, D2 = worker(11, Role.DECODE, 1, 2), worker(12, Role.DECODE, 1, 2)


def test_every_linked_prefill_and_decode_worker_make_a_pair() -> None:
    assert pair_up([D2, P1, D1, P2], "m") == (Pair(1, 11), Pair(1, 12), Pair(2, 11), Pair(2, 12))


@pytest.mark.parametrize(
    "unfit",
    [
        replace(P1, state=State.STARTING),
        replace(P1, state=State.DRAINING),
        replace(P1, session_open=False),
        replace(P1, paused=True),
        replace(P1, model_id="other"),
        replace(P1, terms=replace(TERMS, weights="other")),
        replace(P1, linked=frozenset()),
        replace(P1, role=Role.DECODE),
    ],
)
def test_an_unfit_worker_is_in_no_pair(unfit: WorkerView) -> None:
    assert pair_up([unfit, P2, D1], "m") == (Pair(2, 11),)


def test_pairs_with_a_silent_worker_serve_only_where_there_is_no_other() -> None:
    silent = replace(P1, is_silent=True)
    pairs = pair_up([silent, P2, D1, D2], "m")
    assert heard(pairs, [silent, P2, D1, D2]) == (Pair(2, 11), Pair(2, 12))
    assert heard(pairs, [silent, replace(P2, is_silent=True), D1, replace(D2, is_silent=True)]) == (
        Pair(1, 11),
        Pair(2, 11),
    )
    assert heard(pairs, [P1, P2, D1, D2]) == pairs


def test_a_link_must_hold_in_both_directions() -> None:
    assert pair_up([P1, replace(D1, linked=frozenset({2}))], "m") == ()


def test_a_unified_worker_is_a_pair_of_its_own() -> None:
    assert pair_up([replace(U1, linked=frozenset())], "m") == (Pair(21, 21),)
    assert pair_up([replace(U1, paused=True)], "m") == ()
    assert Pair(21, 21).is_local
    assert not Pair(21, 22).is_local


def test_two_unified_workers_pair_in_both_directions() -> None:
    assert pair_up([U1, U2], "m") == (Pair(21, 21), Pair(21, 22), Pair(22, 21), Pair(22, 22))


def test_a_unified_worker_pairs_with_those_of_either_role() -> None:
    p1, d1 = worker(1, Role.PREFILL, 21), worker(11, Role.DECODE, 21)
    assert pair_up([p1, d1, U1], "m") == (Pair(1, 21), Pair(21, 11), Pair(21, 21))


D3, D4 = worker(13, Role.DECODE, 14, 21), worker(14, Role.DECODE, 13)
U3 = worker(23, Role.UNIFIED, 13, 14)


def test_requests_go_on_at_whoever_makes_outputs_and_is_linked() -> None:
    assert successions([D3, D4, U3, P1], "m") == (Pair(13, 14), Pair(14, 13))
    linked = [replace(D3, linked=frozenset({14, 23})), D4, U3]
    assert successions(linked, "m") == (Pair(13, 14), Pair(13, 23), Pair(14, 13), Pair(23, 13))


def test_nobody_is_asked_for_requests_that_he_can_not_hand_on() -> None:
    keeping = replace(D3, terms=replace(TERMS, features=0))
    assert successions([keeping, D4], "m") == (Pair(14, 13),)


@pytest.mark.parametrize("fields", [{"state": State.DRAINING}, {"paused": True}])
def test_a_worker_that_takes_nothing_new_gives_its_requests_away(fields: dict[str, Any]) -> None:
    leaving = replace(D3, **fields)
    assert successions([leaving, D4], "m") == (Pair(13, 14),)
    assert vacating([leaving, D4, replace(P1, **fields)]) == {13}, "outputs are not made by all"
    unreached = replace(leaving, session_open=False)
    assert not successions([unreached, D4], "m")
    assert not vacating([unreached, D4])


def test_blamed_instances_are_avoided_as_long_as_there_are_others() -> None:
    pairs = (Pair(1, 11), Pair(1, 12), Pair(2, 11), Pair(2, 12))
    assert least_blamed(pairs, ()) == pairs
    assert least_blamed(pairs, {1}) == (Pair(2, 11), Pair(2, 12))
    assert least_blamed(pairs, {1, 2, 11}) == (Pair(1, 12), Pair(2, 12))
    assert least_blamed((Pair(1, 11),), {1, 11}) == (Pair(1, 11),)
    assert least_blamed((), {1}) == ()
    assert least_blamed((Pair(1, 1), Pair(1, 2)), {1}) == (Pair(1, 1), Pair(1, 2))
    assert least_blamed((Pair(1, 1), Pair(2, 3)), {1}) == (Pair(2, 3),)


def test_a_role_is_missing_when_nobody_is_listed_for_it_in_whatever_state() -> None:
    prefill, decode = worker(1, Role.PREFILL), replace(worker(2, Role.DECODE), state=State.DRAINING)
    assert [is_missing(each) for each in ([], [prefill], [decode], [prefill, decode])] == [True, True, True, False]
    assert not is_missing([worker(3, Role.UNIFIED)])


def test_a_pair_is_fresh_when_neither_side_is_blamed() -> None:
    assert has_fresh([Pair(1, 11), Pair(2, 11)], {1})
    assert not has_fresh([Pair(1, 11), Pair(2, 11)], {11})


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([], "no prefill worker for m is usable: none is registered"),
        ([P1], "no decode worker for m is usable: none is registered"),
        ([replace(P1, state=State.STARTING), replace(P2, state=State.DRAINING), D1], "1 draining, 1 starting"),
        ([replace(P1, session_open=False), D1], "1 ready but not connected to this router"),
        ([replace(P1, model_id="x"), D1], "none is registered (other workers serve x)"),
        (
            [P1, replace(D1, terms=replace(TERMS, weights="x"))],
            "may pair: different weights (prefill 0000000000000001 with decode 000000000000000b)",
        ),
        (
            [
                P1,
                P2,
                replace(D1, linked=frozenset()),
                replace(D2, terms=replace(TERMS, oldest_protocol=3, newest_protocol=4)),
            ],
            "links are not up yet; others may not pair: protocol versions 2-2 and 3-4 do not overlap "
            "(prefill 0000000000000001 with decode 000000000000000c and 1 more)",
        ),
        (
            [replace(P1, state=State.STARTING, not_ready="no link over shm"), D1],
            "no prefill worker for m is usable: 1 not ready (no link over shm)",
        ),
        ([replace(P1, linked=frozenset()), D1], "transfer links are not up yet"),
    ],
)
def test_what_is_missing_is_said_in_words(workers: list[WorkerView], words: str) -> None:
    assert pair_up(workers, "m") == ()
    assert words in explain(workers, "m")
