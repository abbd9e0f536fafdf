from __future__ import annotations

from dataclasses import replace

from worker_facts import MODEL_ID, TERMS, facts, link

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.router.choose.breakers import Pause
from diptych.router.choose.pairing import pair_up
from diptych.router.console.fleet.unpaired import MAX_UNPAIRED, unpaired, unpaired_of_all
from diptych.router.console.fleet.worker_facts import WorkerFacts
from diptych.router.console.pieces import at_once
from diptych.router.workers.worker_view import Pair
from diptych.v1.worker_pb2 import LINK_STATE_CONNECTING, LINK_STATE_DOWN, LINK_STATE_REFUSED

P, D = Role.PREFILL, Role.DECODE
OTHER = replace(TERMS, kv_shape="3 layers")


def why(*workers: WorkerFacts) -> dict[tuple[int, int], str]:
    """Return what keeps which workers apart; by the rules of pairing those are all that do not pair."""
    apart = at_once(unpaired(workers, MODEL_ID, {}))
    found = {(int(each["prefill"], 16), int(each["decode"], 16)): each["why"] for each in apart.told.values()}
    views = [each.view for each in workers]
    possible = {(p.instance_id, d.instance_id) for p in views for d in views if p.role.sends_to(d.role)}
    paired = {(pair.prefill_id, pair.decode_id) for pair in pair_up(views, MODEL_ID)}
    alone = {(view.instance_id, view.instance_id) for view in views}
    assert found.keys() == possible - paired - alone
    assert apart.number == len(found)
    assert list(apart.told) == [f"{prefill:016x}-{decode:016x}" for prefill, decode in found]
    return found


def test_workers_that_serve_together_are_not_told() -> None:
    assert why(facts(1, P, [2]), facts(2, D, [1])) == {}


def test_workers_of_two_models_are_no_pairs_that_are_missing() -> None:
    other = [facts(3, P), facts(4, D), facts(5, D)]
    other = [replace(each, view=replace(each.view, model_id="other")) for each in other]
    stray = facts(6, D)
    stray = replace(stray, view=replace(stray.view, model_id="stray"))
    workers = [facts(1, P, [2]), facts(2, D, [1]), *other, stray]
    apart = at_once(unpaired_of_all(workers, [MODEL_ID, "other"], {}))
    found = {(int(each["prefill"], 16), int(each["decode"], 16)): each["why"] for each in apart.told.values()}
    assert found.keys() == {(3, 4), (3, 5), (1, 6)}
    assert found[1, 6] == f"the decode worker serves stray, not {MODEL_ID}"
    assert apart.number == 3


def test_two_of_one_role_are_no_pair_that_is_missing() -> None:
    assert why(facts(1, P), facts(2, P), facts(3, D, [1])) == {
        (1, 3): "not linked yet",
        (2, 3): "not linked yet",
    }


def test_terms_that_differ_are_named_and_the_versions_where_they_differ() -> None:
    newer = {"version": "2.0"}
    assert why(facts(1, P, [2, 3]), facts(2, D, [1], terms=OTHER), facts(3, D, [1], terms=OTHER, record=newer)) == {
        (1, 2): "KV of 2 layers and of 3 layers",
        (1, 3): "KV of 2 layers and of 3 layers (versions 1.0 and 2.0)",
    }


def test_a_link_that_is_not_up_gives_its_reason_whichever_side_knows_it() -> None:
    down, refused = link(2, LINK_STATE_DOWN, reason="its test failed"), link(1, LINK_STATE_REFUSED, reason="old")
    assert why(
        facts(1, P, links=[down, link(3, LINK_STATE_CONNECTING)]),
        facts(2, D),
        facts(3, D),
        facts(4, D, links=[refused]),
    ) == {
        (1, 2): "not linked: down, its test failed",
        (1, 3): "not linked: connecting",
        (1, 4): "not linked: refused, old",
    }


def test_a_link_that_only_one_side_has_is_none() -> None:
    assert why(facts(1, P, [2], links=[link(2)]), facts(2, D)) == {(1, 2): "not linked yet"}


def test_a_worker_that_may_not_serve_says_why() -> None:
    decode = facts(9, D, [1, 2, 3, 4, 5, 6])
    workers = {
        1: facts(1, P, [9], record={"state": State.STARTING}),
        2: facts(2, P, [9], record={"state": State.STARTING, "not_ready": "no link is up"}),
        3: facts(3, P, [9], record={"state": State.DRAINING}),
        4: facts(4, P, [9], record={"paused": True}),
        5: facts(5, P, [9], is_reached=False),
        6: facts(6, P, [9], record={"model_id": "other"}),
    }
    assert why(*workers.values(), decode) == {
        (1, 9): "the prefill worker is starting",
        (2, 9): "the prefill worker is not ready: no link is up",
        (3, 9): "the prefill worker is draining",
        (4, 9): "the prefill worker is paused for an update",
        (5, 9): "the prefill worker is ready, but this router is not connected to it",
        (6, 9): "the prefill worker serves other, not tiny",
    }


def test_those_of_which_both_may_serve_come_first() -> None:
    starting = {"state": State.STARTING}
    told = why(facts(1, P, record=starting), facts(2, P), facts(3, D, record=starting), facts(4, D))
    assert next(iter(told)) == (2, 4)
    assert (told[1, 3], told[2, 3]) == ("the prefill worker is starting", "the decode worker is starting")


def test_workers_that_do_both_pair_in_either_direction() -> None:
    assert why(facts(1, Role.UNIFIED), facts(2, Role.UNIFIED)).keys() == {(1, 2), (2, 1)}


def test_a_link_that_is_left_alone_is_told_although_it_may_serve() -> None:
    workers = [facts(1, P, [2]), facts(2, D, [1])]
    apart = at_once(unpaired(workers, MODEL_ID, {Pair(1, 2): Pause(3, 1.5), 1: Pause(3, 9.0)}))
    assert [each["why"] for each in apart.told.values()] == ["left alone for 2 s more: 3 requests in a row failed"]


def test_of_very_many_some_are_told_and_all_are_counted() -> None:
    workers = [*(facts(number, P) for number in range(1, 31)), *(facts(number, D) for number in range(31, 61))]
    apart = at_once(unpaired(workers, MODEL_ID, {}))
    assert (len(apart.told), apart.number) == (MAX_UNPAIRED, 900)
    starting = [facts(number, P, record={"state": State.STARTING}) for number in range(1, 31)]
    apart = at_once(unpaired([*starting, *workers[30:]], MODEL_ID, {}))
    assert (len(apart.told), apart.number) == (MAX_UNPAIRED, 900)
