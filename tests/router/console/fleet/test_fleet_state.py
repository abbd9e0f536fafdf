from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from worker_facts import MODEL_ID, TERMS, facts, link

from diptych.common.members.roles import Role
from diptych.router.choose.breakers import Pause
from diptych.router.choose.estimates import WorkerSpeed
from diptych.router.choose.fits import Curve
from diptych.router.console.fleet.fleet_state import (
    MAX_LINKS,
    LinkMemo,
    fleet_state,
    queue_s,
    shown_links,
    significant,
    worker_card,
)
from diptych.router.console.fleet.worker_facts import RouterFacts
from diptych.router.console.pieces import at_once
from diptych.router.console.state import Drain, FleetState, Link, RouterCard, StepRate, Unpaired, WorkerCard
from diptych.router.workers.worker_view import WorkerLoad
from diptych.v1 import bootstrap_pb2, worker_pb2
from diptych.v1.worker_pb2 import LINK_STATE_DOWN, LinkStatus, WorkerStatus

RATE = StepRate(steps_per_s=4.0, prompt_tokens_per_s=100, output_tokens_per_s=4, busy=0.5)
LOAD = bootstrap_pb2.WorkerLoad(num_running=3, num_waiting=2, waiting_tokens=500, free_pages=60, total_pages=100)
SPEED = WorkerSpeed(prefill=Curve(0.01, 1e-4), grant_wait_s=0.75)
RECORD = {
    "pool": "fast",
    "pod": "prefill-0",
    "nodes": [
        bootstrap_pb2.GroupNode(node=0, epoch=0xAB, host="10.0.0.1", num_ranks=4),
        bootstrap_pb2.GroupNode(node=1, epoch=0xCD, host="10.0.0.2", pod="p-1", first_rank=4, num_ranks=4),
    ],
    "dp_rank": 1,
    "started_unix_ns": 5_500_000_000,
    "loras": [bootstrap_pb2.LoraAdapter(name=name) for name in ("poems", "code")],
}
STATUS = WorkerStatus(
    pages_by_state={"free": 60, "owned": 30, "cached": 10},
    host_pages=7,
    host_pages_saved=8,
    host_pages_restored=9,
    integrity_failures=1,
    leaks_found=2,
    retractions=3,
    max_requests=64,
    max_step_tokens=2048,
    pages_pulled=11,
    pages_lent=12,
    weights_taken_bytes=13,
    drafting=worker_pb2.Drafting(sources=[worker_pb2.DraftCounts(source="text", verified=[8, 4], accepted=[6, 1])] * 2),
    drain=worker_pb2.Drain(phase=worker_pb2.Drain.PHASE_DRAINING, requests_left=3, oldest_s=1.2345, deadline_s=20.0),
)
LINK = link(
    2,
    path="put",
    lanes="tcp/eth0",
    bytes_per_s=1234567.0,
    bytes_sent=10**9,
    in_flight_bytes=5,
    queued_bytes=6,
    last_heard_s=3.9,
)
UNKNOWN = dict.fromkeys(
    (
        "queue_s",
        "host_pages",
        "host_pages_saved",
        "host_pages_restored",
        "rate",
        "drain",
        "num_links_up",
        "integrity_failures",
        "leaks_found",
        "retractions",
        "max_requests",
        "max_step_tokens",
        "pages_pulled",
        "pages_lent",
        "drafts_verified",
        "drafts_accepted",
        "weights_taken_bytes",
        "prompt_tokens_per_s",
    )
)


def test_a_card_says_all_that_is_known() -> None:
    worker = facts(
        1,
        Role.PREFILL,
        [2],
        load=LOAD,
        record=RECORD,
        speed=SPEED,
        cached_pages=40,
        status=STATUS,
        links=[LINK],
        rate=RATE,
        link_rates={2: 98765.4},
    )
    assert worker_card(worker, {1: Pause(3, 1.2)}, LinkMemo()) == WorkerCard(
        role="prefill",
        pool="fast",
        pod="prefill-0",
        nodes=["10.0.0.1, ranks 0-3, 00000000000000ab", "p-1, ranks 4-7, 00000000000000cd"],
        address="host:1#1",
        version="1.0",
        model=MODEL_ID,
        compat=TERMS.compat,
        state="ready",
        not_ready="",
        is_connected=True,
        silent_s=0,
        is_paused=False,
        breaker="left alone for 2 s more: 3 requests in a row failed",
        started_unix_s=5.5,
        queue_s=0.05,
        num_running=3,
        num_waiting=2,
        queued_tokens=500,
        page_size=16,
        kv_pages={"free": 60, "owned": 30, "cached": 10},
        total_pages=100,
        host_pages=7,
        host_pages_saved=8,
        host_pages_restored=9,
        rate=RATE,
        drain=Drain(phase="draining", requests_left=3, oldest_s=1.2, deadline_s=20.0),
        adapters=["code", "poems"],
        links={
            "0000000000000002": Link(
                state="up",
                reason="",
                path="put",
                lanes="tcp/eth0",
                tested_bytes_per_s=1_230_000.0,
                bytes_per_s=98_800.0,
                bytes_sent=10**9,
                in_flight_bytes=5,
                queued_bytes=6,
                last_heard_s=3.0,
            )
        },
        num_links_up=1,
        integrity_failures=1,
        leaks_found=2,
        retractions=3,
        max_requests=64,
        max_step_tokens=2048,
        pages_pulled=11,
        pages_lent=12,
        drafts_verified=24,
        drafts_accepted=14,
        weights_taken_bytes=13,
        cached_pages=40,
        prompt_tokens_per_s=10_000.0,
    )


def test_what_a_worker_has_not_told_is_null() -> None:
    card = worker_card(facts(1, Role.DECODE, is_reached=False), {}, LinkMemo())
    assert {name: value for name, value in card.items() if value is None} == UNKNOWN
    assert (card["kv_pages"], card["links"], card["is_connected"]) == ({}, {}, False)


@pytest.mark.parametrize(
    ("role", "load", "expected"),
    [
        (Role.PREFILL, WorkerLoad(2, 1000, 0, num_queued=3), 0.13),
        (Role.UNIFIED, WorkerLoad(2, 1000, 0, num_queued=3), 0.13),
        (Role.DECODE, WorkerLoad(2, 0, 0), 0.0),
        (Role.DECODE, WorkerLoad(2, 0, 0, has_credit=False), 0.75),
    ],
)
def test_a_queue_is_of_prompts_or_of_requests_for_pages(role: Role, load: WorkerLoad, expected: float) -> None:
    assert queue_s(replace(facts(1, role, speed=SPEED), load=load)) == expected


def test_of_many_links_those_are_told_that_say_most() -> None:
    num_links = 3 * MAX_LINKS
    links = [link(peer, bytes_sent=5) for peer in range(1, num_links)] + [link(num_links, LINK_STATE_DOWN)]
    rates = {peer: float(peer) for peer in range(1, num_links, 2)}
    shown = shown_links(links, rates, {})
    fastest = sorted(rates, reverse=True)[: MAX_LINKS - 1]
    assert list(shown) == [f"{peer:016x}" for peer in (num_links, *fastest)]
    assert shown_links(links, {}, {}).keys() == {f"{num_links:016x}"}
    assert len(shown_links(links[:MAX_LINKS], {}, {})) == MAX_LINKS


def test_a_state_of_a_later_version_is_a_link_that_is_down() -> None:
    odd = LinkStatus(peer_instance_id=2, state=99, last_heard_s=math.inf)  # type: ignore[arg-type]
    (shown,) = shown_links([odd, LinkStatus(peer_instance_id=2)], {2: math.nan}, {}).values()
    assert (shown["state"], shown["last_heard_s"], shown["bytes_per_s"]) == ("down", 0.0, 0.0)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 0.0), (1234567.0, 1_230_000.0), (0.0012345, 0.00123), (-98765.0, -98800.0)]
)
def test_numbers_have_three_digits_that_count(value: float, expected: float) -> None:
    assert significant(value) == expected


def test_the_fleet_is_its_routers_workers_pools_and_who_does_not_pair() -> None:
    ours = bootstrap_pb2.Instance(instance_id=7, address="host:8000", version="1.0", pod="router-0")
    theirs = bootstrap_pb2.Instance(instance_id=8, address="host:8001", version="1.1")
    here = RouterFacts(7, "1.0", MODEL_ID, "nothing works", [ours, theirs])
    state = at_once(fleet_state(here, [facts(1, Role.PREFILL, [2]), facts(2, Role.DECODE)], LinkMemo()))
    one, two = f"{1:016x}", f"{2:016x}"
    assert state == FleetState(
        router=f"{7:016x}",
        version="1.0",
        model=MODEL_ID,
        problem="nothing works",
        routers={
            f"{7:016x}": RouterCard(address="host:8000", version="1.0", pod="router-0", is_here=True),
            f"{8:016x}": RouterCard(address="host:8001", version="1.1", pod="", is_here=False),
        },
        workers={one: state["workers"][one], two: state["workers"][two]},
        unpaired={f"{one}-{two}": Unpaired(prefill=one, decode=two, why="not linked yet")},
        num_unpaired=1,
        pools=state["pools"],
    )
    assert state["pools"].keys() == {"prefill", "decode"}
    assert json.loads(json.dumps(state)) == state


def test_links_that_are_as_they_were_are_the_same_object() -> None:
    memo, idle, busy = LinkMemo(), link(2, bytes_sent=5, last_heard_s=0.2), link(3, bytes_sent=5)
    first = facts(1, Role.PREFILL, links=[idle, busy])
    before = memo.shown(first)
    assert memo.shown(first) is before
    later = link(2, bytes_sent=5, last_heard_s=0.9), link(3, bytes_sent=9)
    after = memo.shown(facts(1, Role.PREFILL, links=later, link_rates={3: 4.0}))
    two, three = f"{2:016x}", f"{3:016x}"
    assert after.told[two] is before.told[two]
    assert (after.told[three]["bytes_sent"], after.told[three]["bytes_per_s"], after.num_up) == (9, 4.0, 2)
    idle_again = memo.shown(facts(1, Role.PREFILL, links=later))
    assert idle_again.told[three]["bytes_per_s"] == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"state": LINK_STATE_DOWN},
        {"bytes_sent": 6},
        {"in_flight_bytes": 1},
        {"queued_bytes": 1},
        {"path": "put"},
        {"lanes": "tcp"},
        {"last_heard_s": 1.0},
    ],
)
def test_any_change_of_an_idle_link_is_told(change: dict[str, Any]) -> None:
    memo = LinkMemo()
    before = memo.shown(facts(1, Role.PREFILL, links=[link(2, bytes_sent=5)])).told
    changed = memo.shown(facts(1, Role.PREFILL, links=[link(2, **{"bytes_sent": 5, **change})])).told
    assert changed != before


def test_a_worker_that_has_gone_is_forgotten() -> None:
    memo, here = LinkMemo(), RouterFacts(7, "1.0", MODEL_ID)
    gone = facts(1, Role.PREFILL, links=[link(2)])
    at_once(fleet_state(here, [gone], memo))
    before = memo.shown(gone)
    at_once(fleet_state(here, [], memo))
    assert memo.shown(gone) is not before
