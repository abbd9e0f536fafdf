from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from diptych.engine.schedule.adapter_turns import PATIENCE, AdapterTurns, Rank
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams

NO_ADAPTER = -1


class Turned:
    """Turns over two slots, and what was placed."""

    def __init__(self, num_slots: int = 2) -> None:
        self.placed: list[tuple[int, int]] = []
        self.turns = AdapterTurns(num_slots, lambda number, slot: self.placed.append((number, slot)))

    def take(self, room: int, number: int) -> bool:
        return self.take_for(request(room, number))

    def take_for(self, request: Request) -> bool:
        if not self.turns.may_take(request):
            return False
        self.turns.take(request)
        return True


def request(room: int, number: int) -> Request:
    return new_request(room, np.arange(3), SamplingParams(max_tokens=1), adapter=number)


@pytest.fixture
def two() -> Iterator[Turned]:
    turned = Turned()
    yield turned
    turned.turns.check()


def test_a_request_without_an_adapter_waits_for_nothing(two: Turned) -> None:
    assert all(two.take(room, NO_ADAPTER) for room in range(5))
    assert two.placed == []


def test_an_adapter_is_placed_once_for_all_that_have_it(two: Turned) -> None:
    first, second = request(1, 7), request(2, 7)
    assert two.take_for(first)
    assert two.take_for(second)
    assert two.take_for(first), "it has it"
    assert (first.adapter_slot, second.adapter_slot) == (0, 0)
    assert two.placed == [(7, 0)]


def test_without_a_free_slot_a_request_waits_until_nobody_has_one(two: Turned) -> None:
    for room in (1, 2):
        assert two.take(room, room)
    assert not two.take(3, 3)
    reason = two.turns.reason(request(3, 3))
    assert not reason.is_over(0.0)
    two.turns.end(1)
    assert reason.is_over(0.0)
    assert two.take(3, 3)
    assert two.placed == [(1, 0), (2, 1), (3, 0)]


def test_an_adapter_that_nobody_has_stays_until_its_slot_is_needed_and_the_oldest_goes_first(two: Turned) -> None:
    for room in (1, 2):
        two.take(room, room)
    for room in (2, 1):
        two.turns.end(room)
    assert two.take(3, 1), "it is there still"
    two.turns.end(3)
    assert two.take(4, 4)
    assert two.placed == [(1, 0), (2, 1), (4, 1)]


def test_adapters_get_slots_in_the_order_in_which_they_were_wanted(two: Turned) -> None:
    for room in (1, 2, 3, 4):
        two.take(room, room)
    two.turns.end(1)
    assert not two.take(4, 4), "another one waits for longer"
    assert two.take(3, 3)
    two.turns.end(2)
    assert two.take(4, 4)


def test_who_ends_while_it_waits_holds_nobody_up(two: Turned) -> None:
    for room in (1, 2, 3, 4):
        two.take(room, room)
    two.turns.end(3)
    two.turns.end(1)
    assert two.take(4, 4)


def test_an_adapter_in_use_is_joined_by_so_many_and_then_runs_out_while_others_wait(two: Turned) -> None:
    for room in (1, 2, 3):
        two.take(room, room)
    joined = [two.take(100 + each, 1) for each in range(PATIENCE + 5)]
    assert joined == [True] * PATIENCE + [False] * 5
    for room in (1, *range(100, 100 + PATIENCE)):
        two.turns.end(room)
    assert two.take(3, 3)
    assert not two.take(500, 1), "it is behind others now"


def test_an_adapter_is_not_kept_from_its_own_slot_when_nobody_else_waits() -> None:
    one = Turned(1)
    assert one.take(1, 1)
    assert not one.take(2, 2)
    for each in range(PATIENCE):
        one.take(100 + each, 1)
    assert not one.take(500, 1)
    one.turns.end(2)  # it is aborted
    assert one.take(501, 1)
    assert one.take(500, 1)
    assert not one.take(3, 2)
    assert all(one.take(200 + each, 1) for each in range(PATIENCE)), "it is counted anew"
    assert not one.take(502, 1)
    one.turns.check()


def test_those_in_line_that_have_a_slot_keep_nobody_from_joining(two: Turned) -> None:
    for room in (1, 2, 3):
        two.take(room, room)
    for each in range(PATIENCE):
        two.take(100 + each, 1)
    assert [two.take(500 + number, number) for number in (1, 2)] == [False, False]
    two.turns.end(3)
    assert [two.take(500 + number, number) for number in (1, 2)] == [True, True]


def test_who_holds_memory_goes_first_then_prompts_for_others_then_who_ran_and_then_who_is_served_alone() -> None:
    one = Turned(1)
    assert one.take(1, 1)
    alone, ran, prompt, holds = (request(10 + number, number) for number in (2, 3, 4, 5))
    ran.append(7)
    holds.row = 0
    assert not one.turns.may_take(alone, Rank.ALONE)
    assert not any(one.take_for(each) for each in (ran, prompt, holds))
    one.turns.end(1)
    assert one.turns.runnable([holds]) == [holds]
    for ends, next_one in ((holds, prompt), (prompt, ran)):
        one.turns.end(ends.room)
        assert not one.turns.may_take(alone, Rank.ALONE)
        assert one.take_for(next_one)
    one.turns.end(ran.room)
    assert one.turns.may_take(alone, Rank.ALONE)
    one.turns.take(alone)
    one.turns.check()


def test_kv_is_held_back_when_so_many_whose_kv_came_have_passed_new_ones() -> None:
    one = Turned(1)
    assert one.take(1, 1)
    assert not one.take(2, 2)
    one.turns.end(1)
    for room in range(100, 100 + PATIENCE):
        came = request(room, 3 + room % 3)
        assert one.turns.reason_for_import(came) is None
        came.row = 0
        came.append(7)
        assert one.take_for(came)
        one.turns.end(room)
    reason = one.turns.reason_for_import(request(500, 3))
    assert reason is not None
    assert one.turns.reason_for_import(request(501, NO_ADAPTER)) is None
    assert not reason.is_over(0.0)
    assert one.take(2, 2)
    assert reason.is_over(0.0)


def test_a_loaded_adapter_gets_an_empty_slot_at_once_and_no_other(two: Turned) -> None:
    for number in (5, 6, 7):
        two.turns.offer(number)
    assert two.placed == [(5, 0), (6, 1)]
    assert two.take(1, 6)
    assert two.take(2, 7)
    assert two.placed == [(5, 0), (6, 1), (7, 0)]


def test_an_unloaded_adapter_leaves_its_slot(two: Turned) -> None:
    two.take(1, 1)
    two.turns.end(1)
    assert two.turns.forget(1) == 0
    assert two.turns.forget(1) is None
    assert two.take(2, 1), "another adapter under the same number"
    assert two.placed == [(1, 0), (1, 0)]


@pytest.mark.parametrize("seed", range(10))
def test_whoever_asks_again_and_again_gets_a_slot_and_nobodys_slot_is_taken(seed: int) -> None:
    """Six adapters in three slots: requests come and go in any order, and some leave while they wait."""
    rng, turned = random.Random(seed), Turned(3)
    waiting: dict[int, Request] = {}
    running: dict[int, Request] = {}
    asked: dict[int, int] = {}
    for room in range(2000):
        waiting[room] = request(room, rng.choice([0, 0, 0, 1, 1, 2, 3, 4, 5]))
        for each in list(waiting):
            asked[each] = asked.get(each, 0) + 1
            if turned.take_for(waiting[each]):
                running[each] = waiting.pop(each)
                slots = {one.adapter: one.adapter_slot for one in running.values()}
                assert all(slots[one.adapter] == one.adapter_slot for one in running.values())
                assert len(set(slots.values())) == len(slots)
        for ends in (running, waiting):
            for each in rng.sample(list(ends), min(len(ends), 2 if ends is running else rng.random() < 0.05)):
                turned.turns.end(each)
                del ends[each]
        turned.turns.check()
    assert max(asked.values()) < 20 * PATIENCE
