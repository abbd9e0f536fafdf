from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from null_runner import expected_output

from diptych.common.members.roles import LegKind, Role
from diptych.engine.schedule.adapter_turns import EnoughSlots
from diptych.engine.schedule.running import Running
from diptych.engine.values.batch import ForwardBatch
from diptych.engine.values.events import AbortRoom, NoteArrived, Start
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.request import Request, new_request
from diptych.generation.output import FailureCode
from diptych.generation.request_groups import Life
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo
from diptych.kvtransfer.notes import Abort, HandOff

VOCAB = 1000
PROMPTS = {room: [room * 7 + i for i in range(10 + room)] for room in range(1, 7)}

FleetClass = Any  # the fixture's class: test helpers can't be imported


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_go_both_ways_between_two_workers_and_stay_on_one(fleet_class: FleetClass, overlap: bool) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, overlap=overlap)
    for (room, prompt), (prefill, decode) in zip(
        PROMPTS.items(), [(1, 2), (2, 1), (1, 1), (2, 2), (2, 1), (1, 2)], strict=True
    ):
        fleet.start(room, prompt, prefill, decode)
    fleet.run()
    assert {room: fleet.tokens(room) for room in PROMPTS} == {
        room: expected_output(prompt, 5, VOCAB) for room, prompt in PROMPTS.items()
    }
    received = [sum(-(-len(PROMPTS[room]) // 4) for room in rooms) for rooms in ((2, 5), (1, 6))]
    assert [worker.core.report().counts.pages_received for worker in fleet.workers.values()] == received
    assert [worker.core.report().num_open_rooms for worker in fleet.workers.values()] == [0, 0]
    fleet.close()


def test_a_step_that_decodes_runs_on_while_the_next_is_planned_unless_a_prompt_waits(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, overlap=True)
    core = fleet.workers[1].core
    fleet.start(1, [1, 2, 3], 1, 1, max_tokens=40)
    for _ in range(3):
        fleet.advance(1)
    assert core.can_overlap
    fleet.start(2, list(range(20)), 1, 2)
    assert core.can_overlap  # nothing is granted yet
    fleet.deliver(2)
    assert not core.can_overlap
    fleet.run()
    assert fleet.tokens(1) == expected_output([1, 2, 3], 40, VOCAB)
    assert fleet.tokens(2) == expected_output(list(range(20)), 5, VOCAB)
    fleet.close()


@pytest.mark.parametrize("first", [0, 1], ids=["of the one that runs", "of one that waits"])
def test_a_request_that_waits_for_a_prefix_keeps_its_place_among_those_that_are_served_alone(
    fleet_class: FleetClass, first: int
) -> None:
    fleet = fleet_class(Role.UNIFIED, num_pages=400)
    prompts = [list(range(room * 200, room * 200 + 120)) for room in range(5)]
    prompts.insert(first + 1, [*prompts[first], 999])
    for room, prompt in enumerate(prompts):
        fleet.start(room, prompt, 1, 1, max_tokens=1)
    fleet.run()
    assert list(fleet.workers[1].outputs) == list(range(6)), "in the order in which they came"


def test_what_one_side_computed_is_a_cached_prefix_for_the_other(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    prompt = list(range(20))
    for room, (prefill, decode) in enumerate([(1, 2), (2, 2), (2, 1)], 1):
        fleet.start(room, prompt, prefill, decode)
        fleet.run()
    cached = [fleet.workers[worker].outputs[room][-1].stats.cached_tokens for room, worker in ((2, 2), (3, 2))]
    assert cached == [20, 20]


def test_prompts_and_decoding_requests_take_turns(fleet_class: FleetClass, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    core = fleet.workers[1].core
    fleet.start(1, [1, 2, 3], 1, 1, max_tokens=30)
    fleet.advance(1)
    fleet.start(2, list(range(80)), 1, 2)  # ten steps
    fleet.deliver(2)
    rows: list[int] = []
    plan: Callable[[float], ForwardBatch | None] = core.plan

    def record(now_s: float) -> ForwardBatch | None:
        batch = plan(now_s)
        rows.append(len(batch.input_ids) if batch else 0)
        return batch

    monkeypatch.setattr(core, "plan", record)
    for _ in range(20):
        fleet.advance(1)
    assert sorted(rows[:2]) == [1, 8]
    assert rows == rows[:2] * 10
    fleet.run()


@pytest.mark.parametrize("is_local_first", [False, True])
@pytest.mark.parametrize("decodes", [False, True])
def test_prompts_of_both_sides_are_computed_in_the_order_in_which_they_came(
    fleet_class: FleetClass, monkeypatch: pytest.MonkeyPatch, is_local_first: bool, decodes: bool
) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    core, computed = fleet.workers[1].core, list[int]()
    plan: Callable[[float], ForwardBatch | None] = core.plan

    def record(now_s: float) -> ForwardBatch | None:
        batch = plan(now_s)
        if batch is not None:
            computed.extend(room for room in (1, 2) if room in core.rooms_of_step() and not fleet.tokens(room))
        return batch

    if decodes:
        fleet.start(9, [1, 2, 3], 1, 1, max_tokens=100)
        fleet.advance(1)
    came_s = {1: 1.0 if is_local_first else 2.0, 2: 2.0 if is_local_first else 1.0}
    fleet.start_leg(1, 1, list(range(40)), LegKind.LOCAL, 0, life=Life(arrival_s=came_s[1]))
    for worker, kind, peer in ((2, LegKind.DECODE, 1), (1, LegKind.PREFILL, 2)):
        fleet.start_leg(worker, 2, list(range(100, 140)), kind, peer, life=Life(arrival_s=came_s[2]))
    fleet.deliver(2)
    monkeypatch.setattr(core, "plan", record)
    while not (fleet.tokens(1) and fleet.tokens(2)):
        fleet.advance(1)
    turns = [room for room, before in zip(computed, [0, *computed], strict=False) if room != before]
    assert turns[-2:] == ([1, 2] if is_local_first else [2, 1]), "once begun, no other passes"
    assert len(turns) <= 3
    fleet.run()
    assert fleet.tokens(1) == expected_output(list(range(40)), 5, VOCAB)
    assert fleet.tokens(2) == expected_output(list(range(100, 140)), 5, VOCAB)


def take_time(fleet: Any, now_s: list[float], rows: list[int]) -> None:
    """Let steps of the first worker take a millisecond a token; note how many each has."""
    core = fleet.workers[1].core
    plan: Callable[[float], ForwardBatch | None] = core.plan

    def record(at_s: float) -> ForwardBatch | None:
        if batch := plan(at_s):
            rows.append(len(batch.input_ids))
            now_s[0] += len(batch.input_ids) / 1000
        return batch

    core.plan = record


def test_a_request_that_decodes_waits_for_a_bounded_time_for_prompts_of_other_workers(fleet_class: FleetClass) -> None:
    """A millisecond a token: steps of 64 ms may be 20 ms long while somebody waits."""
    now_s: list[float] = [0.0]
    rows: list[int] = []
    limits = Limits(256, VOCAB, frozenset(), max_step_tokens=64, max_requests=8, mixed_step_s=0.02)
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=200, clock=lambda: now_s[0], limits=limits)
    take_time(fleet, now_s, rows)
    fleet.start(1, [1] * 60, 1, 1, max_tokens=30)
    fleet.advance(1)
    fleet.start(2, list(range(100)), 1, 2)
    fleet.deliver(2)
    fleet.run()
    assert rows[0] == 60
    assert set(rows[1:]) == {1, 20}
    assert [fleet.tokens(room) for room in (1, 2)] == [
        expected_output([1] * 60, 30, VOCAB),
        expected_output(list(range(100)), 5, VOCAB),
    ]


class NoTurn(EnoughSlots):
    """The first room has no turn while `is_on` is set."""

    is_on = False

    def runnable(self, requests: list[Request]) -> list[Request]:
        return [request for request in requests if not self.is_on or request.room != 1]


def test_prompts_of_other_workers_are_computed_though_an_output_without_a_turn_is_late(fleet_class: FleetClass) -> None:
    """Two milliseconds per token leave no time for a prompt that is worth a step."""
    now_s, turns = [0.0], NoTurn()
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=200, clock=lambda: now_s[0], turns=turns)
    take_time(fleet, now_s, [])
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    request = new_request(1, np.array(PROMPTS[1]), params, slo=Slo(tpot_s=0.002))
    fleet.workers[1].core.handle(Start(request, 0, LegKind.LOCAL), 0.0)
    while not fleet.tokens(1):
        fleet.advance(1)
    turns.is_on, now_s[0] = True, 1.0
    fleet.start(2, list(range(100)), 1, 2)
    fleet.deliver(2)
    fleet.run()
    assert fleet.tokens(2) == expected_output(list(range(100)), 5, VOCAB)
    assert len(fleet.tokens(1)) < 30
    turns.is_on = False
    fleet.run()
    assert fleet.tokens(1) == expected_output(PROMPTS[1], 30, VOCAB)


def test_a_leg_of_another_role_is_refused_until_the_role_changes(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.PREFILL, Role.UNIFIED)
    fleet.start_leg(1, 1, [1, 2, 3], LegKind.LOCAL, 0)
    fleet.run()
    assert fleet.failures(1) == ["this worker serves prefill now, no local legs"]
    fleet.serve(1, Role.UNIFIED)
    fleet.start(2, [1, 2, 3], 1, 1)
    fleet.start(3, [1, 2, 3], 2, 1)
    fleet.run()
    assert [fleet.tokens(room) for room in (2, 3)] == [expected_output([1, 2, 3], 5, VOCAB)] * 2


def test_a_leg_that_names_no_kind_is_what_the_role_says(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.PREFILL, Role.DECODE, Role.UNIFIED)
    fleet.start_leg(2, 1, [1, 2, 3], None, 1)
    fleet.start_leg(1, 1, [1, 2, 3], None, 2)
    fleet.start_leg(3, 2, [1, 2, 3], None, 2)
    fleet.run()
    assert fleet.tokens(1) == expected_output([1, 2, 3], 5, VOCAB)
    assert fleet.failures(2) == ["the leg doesn't say which part of the request it is"]


def test_a_room_is_of_one_side_only(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    fleet.start_leg(1, 1, [1, 2, 3], LegKind.PREFILL, 2)
    fleet.start_leg(1, 1, [1, 2, 3], LegKind.LOCAL, 0)
    fleet.deliver(1)
    assert fleet.failures(1) == ["room 0000000000000001 is already in use"]


def test_what_began_in_a_former_role_comes_to_its_end(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    fleet.start(1, list(range(20)), 1, 2)
    fleet.start(2, list(range(20)), 2, 1)
    fleet.deliver(1)
    fleet.serve(1, Role.DECODE)
    fleet.run()
    assert [fleet.tokens(room) for room in (1, 2)] == [expected_output(list(range(20)), 5, VOCAB)] * 2


@pytest.mark.parametrize("kind", [LegKind.PREFILL, LegKind.DECODE])
def test_an_abort_of_the_peer_reaches_the_side_that_has_the_room(fleet_class: FleetClass, kind: LegKind) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED)
    fleet.start_leg(1, 1, [1, 2, 3], kind, 2)
    core = fleet.workers[1].core
    core.handle(NoteArrived(2, Abort(1, FailureCode.TRANSFER_FAILED.value, "words")), 0.0)
    fleet.deliver(1)
    assert fleet.failures(1) == ["words"]
    assert core.report().num_open_rooms == 0


def test_notes_of_unknown_rooms_are_answered_by_the_side_that_hears_such_notes(fleet_class: FleetClass) -> None:
    core = fleet_class(Role.UNIFIED).workers[1].core
    core.handle(NoteArrived(2, Abort(1, 0, "")), 0.0)
    core.handle(NoteArrived(2, HandOff(3, 5, None, 1, (0,), 0)), 0.0)
    answers = [(effect.peer, type(effect.note), effect.note.room) for effect in core.pop_effects()]
    assert sorted((name.__name__, peer, room) for peer, name, room in answers) == [("AbortAck", 2, 1), ("Ack", 2, 3)]


def test_two_workers_whose_pools_are_granted_to_each_other_come_to_an_end(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=13)
    prompts = {room: [room] * (22 if room <= 2 else 4) for room in range(1, 15)}  # the first two: half of a pool
    pairs = {room: (1, 2) if room % 2 else (2, 1) for room in prompts}
    for room, (prefill, decode) in pairs.items():
        fleet.start_leg(decode, room, prompts[room], LegKind.DECODE, prefill, 2)
    for number in (1, 2):  # all that can be granted is, before any prompt comes
        fleet.deliver(number)
    for room, (prefill, decode) in pairs.items():
        fleet.start_leg(prefill, room, prompts[room], LegKind.PREFILL, decode, 2)
    fleet.run()
    assert {room: fleet.tokens(room) for room in prompts} == {
        room: expected_output(prompt, 2, VOCAB) for room, prompt in prompts.items()
    }


def test_the_reserve_is_what_prompts_may_take_less_what_they_have(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=33)
    core = fleet.workers[1].core
    assert (core.max_tokens, core.load().grantable_pages) == (64, 16)
    fleet.start(1, list(range(20)), 1, 2)
    fleet.deliver(2)
    core.plan(0.0)
    assert core.load().grantable_pages == 32 - 5 - (16 - 5)
    fleet.serve(1, Role.DECODE)
    assert (core.max_tokens, core.load().grantable_pages) == (128, 32 - 5)
    fleet.serve(1, Role.PREFILL)
    assert core.load().grantable_pages == 0


def test_no_page_can_be_granted_while_the_last_row_is_kept_for_a_prompt(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED)
    worker = fleet.workers[1]
    for room in range(7):
        fleet.start_leg(1, room, [room + 1], LegKind.LOCAL, 0)
    assert worker.core.load().grantable_pages == 0
    worker.core.plan(0.0)
    assert worker.cache.num_free_rows == 1
    assert worker.core.load().grantable_pages == 0


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.LOCAL])
def test_the_last_row_is_for_a_prompt_of_another_worker_in_every_role(fleet_class: FleetClass, role: Role) -> None:
    fleet = fleet_class(role, Role.DECODE, num_pages=400)
    worker = fleet.workers[1]
    for room in range(worker.cache.num_rows):
        fleet.start(room, [room + 1], 1, 1, max_tokens=40)
    for _ in range(5):
        fleet.advance(1)
    assert len(worker.outputs) == worker.core.load().num_running == worker.cache.num_rows - PROMPT_ROWS
    fleet.serve(1, Role.UNIFIED)
    fleet.start(100, [1, 2, 3], 1, 2)
    for _ in range(5):
        fleet.deliver(2)
        fleet.advance(1)
    assert fleet.tokens(100) == expected_output([1, 2, 3], 5, VOCAB)[:1], "while all others run"
    assert worker.core.load().num_running == worker.cache.num_rows - PROMPT_ROWS
    fleet.run()


def test_a_full_worker_does_not_look_at_who_waits_in_each_step(
    fleet_class: FleetClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pages to spare there would be takes as long to count as all else of a step."""
    fleet = fleet_class(Role.LOCAL, num_pages=400)
    worker, counted = fleet.workers[1], list[int]()
    for room in range(worker.cache.num_rows + 2):
        fleet.start(room, [room + 1], 1, 1, max_tokens=40)
    for _ in range(3):
        fleet.advance(1)
    spare_pages = Running.spare_pages

    def noted(running: Running, *args: Any) -> int:
        counted.append(1)
        return spare_pages(running, *args)

    monkeypatch.setattr(Running, "spare_pages", noted)
    for _ in range(10):
        fleet.advance(1)
    assert worker.core.load().num_running == worker.cache.num_rows - PROMPT_ROWS
    assert counted == []
    fleet.run()


def test_an_abort_of_the_router_reaches_a_local_request(fleet_class: FleetClass) -> None:
    fleet = fleet_class(Role.UNIFIED)
    fleet.start(1, list(range(20)), 1, 1)
    fleet.advance(1)
    fleet.workers[1].core.handle(AbortRoom(1, "gone"), 0.0)
    fleet.run()
    assert fleet.failures(1) == ["gone"]
    assert fleet.workers[1].core.report().num_open_rooms == 0
