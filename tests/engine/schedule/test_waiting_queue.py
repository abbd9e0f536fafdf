from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from flat_request import flat_request

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tier import Restore
from diptych.engine.schedule.aside import MAX_ASIDE
from diptych.engine.schedule.policies import IDLE_PATIENCE_S, POLICIES
from diptych.engine.schedule.waiting_queue import MAX_RESTORES, WaitingQueue, new_waiting_queue
from diptych.engine.values.limits import Scheduling
from diptych.engine.values.request import NO_PAGES, Request
from diptych.generation.sampling_params import SamplingParams


def request(room: int, tenant: str = "", arrival_s: float = 0.0, priority: int = 0, length: int = 8) -> Request:
    prompt = np.arange(length) + 100 * room
    params = SamplingParams(max_tokens=4)
    return flat_request(room, prompt, params, tenant=tenant, arrival_s=arrival_s, priority=priority)


def queue(policy: str = "fcfs", **weights: float) -> WaitingQueue:
    cache = KvCache(num_pages=65, page_size=4, max_requests=8, max_tokens_per_request=64)
    return new_waiting_queue(cache, Scheduling(policy, tenant_weights=weights))


def pop_all(queue: WaitingQueue, now_s: float = 0.0) -> list[int]:
    rooms = []
    while queue:
        request = queue.peek(now_s)
        queue.on_admitted(request)
        rooms.append(request.room)
    return rooms


def test_equal_requests_keep_their_order() -> None:
    line = queue()
    for room in (5, 3, 4):
        line.add(request(room))
    assert pop_all(line) == [5, 3, 4]


def test_tenants_take_turns_however_many_requests_one_sends() -> None:
    line = queue()
    for room in range(1, 7):
        line.add(request(room, "many"))
    line.add(request(7, "few"))
    line.add(request(8, "few"))
    assert pop_all(line) == [1, 7, 2, 8, 3, 4, 5, 6]


def test_a_heavier_tenant_gets_more_turns() -> None:
    line = queue(gold=2.0)
    for room in range(1, 7):
        line.add(request(room, "gold" if room % 2 else "free"))
    assert pop_all(line) == [1, 2, 3, 5, 4, 6]


def test_priority_orders_a_tenants_own_requests_only() -> None:
    line = queue("priority")
    line.add(request(1, "a"))
    line.add(request(2, "a", priority=5))
    line.add(request(3, "b"))
    assert pop_all(line) == [2, 3, 1]


def test_retracted_requests_go_first_the_last_one_at_the_head() -> None:
    line = queue("priority")
    line.add(request(1, priority=9))
    line.add_first(request(2))
    line.add_first(request(3))
    assert pop_all(line) == [3, 2, 1]


def test_the_next_request_stays_the_next_until_it_is_taken() -> None:
    line = queue("priority")
    line.add(request(1))
    assert line.peek(0.0).room == 1
    line.add(request(2, priority=5))
    assert line.peek(0.0).room == 1
    line.remove(line.peek(0.0))
    assert line.peek(0.0).room == 2


def test_requests_that_leave_are_counted_out() -> None:
    line = queue()
    requests = [request(room, tenant, length=room) for room, tenant in zip((4, 5, 6), "aab", strict=True)]
    for made in requests:
        line.add(made)
    line.add_first(request(7, length=7))
    assert (len(line), line.num_tokens) == (4, 22)
    line.remove(requests[1])
    assert (len(line), line.num_tokens) == (3, 17)
    assert {made.room for made in line} == {4, 6, 7}
    assert pop_all(line) == [7, 4, 6]
    assert (len(line), line.num_tokens) == (0, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plain_request_is_not_starved_by_endless_better_ones(policy: str) -> None:
    """One request a second is served, two of another tenant and one preferred of our own arrive."""
    line = queue(policy)
    rooms = itertools.count(2)
    line.add(request(1, "a", arrival_s=0.0))
    for second in range(1, 2000):
        line.add(request(next(rooms), "a", arrival_s=second, priority=20))
        line.add(request(next(rooms), "b", arrival_s=second, priority=20))
        line.add(request(next(rooms), "b", arrival_s=second, priority=20))
        served = line.peek(float(second))
        line.on_admitted(served)
        if served.room == 1:
            return
    raise AssertionError("starved")


def idle(room: int, tenant: str = "", arrival_s: float = 0.0) -> Request:
    made = request(room, tenant, arrival_s)
    made.is_idle_work = True
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_text_goes_before_any_amount_of_its_tenants_work_for_idle_time(policy: str) -> None:
    line = queue(policy)
    for room in range(1, 201):
        line.add(idle(room))
    assert line.peek(0.0).is_idle_work
    line.add(request(201, arrival_s=1.0))
    assert pop_all(line, 1.0) == [201, *range(1, 201)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("other", ["", "another"])
def test_work_for_idle_time_waits_a_bounded_time_for_text_that_always_comes(policy: str, other: str) -> None:
    """One request a second is served, and two of text come, of its tenant or another one."""
    line, rooms = queue(policy), itertools.count(2)
    line.add(idle(1))
    for second in range(2000):
        for _ in range(2):
            line.add(request(next(rooms), other, arrival_s=float(second)))
        served = line.peek(float(second))
        line.on_admitted(served)
        if served.room == 1:
            assert second >= IDLE_PATIENCE_S
            assert second <= IDLE_PATIENCE_S + (1 if other else 600)
            return
    raise AssertionError("starved")


def test_work_for_idle_time_may_leave_or_be_set_aside_while_its_patience_ends() -> None:
    line = queue()
    works = [idle(room) for room in (1, 2, 3)]
    for work in works:
        line.add(work)
    line.peek(0.0)
    assert line.set_aside(Until(90.0))
    line.remove(works[1])
    line.add(request(4, arrival_s=50.0))
    assert line.peek(IDLE_PATIENCE_S).room == 3
    line.bring_back(90.0)
    assert pop_all(line, 90.0) == [1, 3, 4]
    assert (len(line), line.has_next) == (0, False)


@dataclass
class Until:
    """A reason to wait."""

    until_s: float

    def is_over(self, now_s: float) -> bool:
        return now_s >= self.until_s


def test_those_set_aside_are_passed_and_then_have_their_places_again() -> None:
    line = queue()
    for room in (1, 2, 3):
        line.add(request(room))
    line.add_first(request(9))
    for _ in range(3):
        line.peek(0.0)
        assert line.set_aside(Until(1.0))
    assert line.peek(0.0).room == 3
    line.bring_back(0.5)
    assert line.peek(0.5).room == 3
    assert (len(line), [each.room for each in line.aside]) == (4, [9, 1, 2])
    assert sorted(each.room for each in line) == [1, 2, 3, 9]
    line.on_admitted(line.peek(0.0))
    assert not line.has_next
    line.bring_back(1.0)
    assert pop_all(line) == [9, 1, 2]


def test_each_that_was_set_aside_comes_back_when_its_own_reason_is_over() -> None:
    line = queue()
    for room in (1, 2, 3, 4):
        line.add(request(room))
    for end_s in (3.0, 1.0, 2.0):
        line.peek(0.0)
        assert line.set_aside(Until(end_s))
    assert line.peek(0.0).room == 4  # it does not fit, say
    order = []
    for now_s in (1.0, 2.0, 3.0):
        line.bring_back(now_s)
        order.append(line.peek(now_s).room)
        line.on_admitted(line.peek(now_s))
    assert order == [2, 3, 1]  # each ranks before the one that does not fit
    assert pop_all(line) == [4]


def test_a_request_lets_others_pass_for_a_few_restores_only() -> None:
    """What was restored for it may be lost again to those that pass."""
    line = queue()
    line.add(request(1))
    for number in range(MAX_RESTORES):
        line.peek(0.0).restore = restore = Restore(number, 1, NO_PAGES, NO_PAGES, 0, 0)
        assert line.set_aside_for_restore()
        assert (line.has_next, line.next_s()) == (False, None)
        restore.has_ended = True
        line.bring_back(0.0)
    line.peek(0.0).restore = Restore(MAX_RESTORES, 1, NO_PAGES, NO_PAGES, 0, 0)
    assert not line.set_aside_for_restore()
    assert pop_all(line) == [1]


def test_a_request_that_waits_for_memory_lets_nobody_pass() -> None:
    line = queue()
    line.add(request(1))
    line.peek(0.0)
    assert not line.set_aside_for_restore()


def test_those_set_aside_can_leave() -> None:
    line = queue()
    requests = {room: request(room, length=room) for room in (1, 2, 9)}
    line.add(requests[1])
    line.add(requests[2])
    line.add_first(requests[9])
    for _ in range(3):
        line.peek(0.0)
        line.set_aside(Until(1.0))
    for room in (9, 1):
        line.remove(requests[room])
    assert (len(line), line.num_tokens, line.num_prompts) == (1, 2, 1)
    line.bring_back(1.0)
    assert pop_all(line) == [2]


def test_a_tenant_whose_requests_are_set_aside_keeps_its_turn() -> None:
    line = queue()
    line.add(request(1, "a"))
    line.peek(0.0)
    line.set_aside(Until(1.0))
    line.add(request(2, "b", length=100))
    line.on_admitted(line.peek(0.0))
    line.add(request(3, "b"))
    line.peek(0.0)  # the turn of one that was charged already
    line.add(request(4, "a"))
    line.bring_back(1.0)
    assert pop_all(line) == [1, 4, 3]


def test_no_more_than_a_few_are_set_aside() -> None:
    line = queue()
    for room in range(1, MAX_ASIDE + 2):
        line.add(request(room))
    for _ in range(MAX_ASIDE):
        line.peek(0.0)
        assert line.set_aside(Until(1.0))
    line.peek(0.0)
    assert not line.set_aside(Until(1.0))
    line.bring_back(1.0)
    assert pop_all(line) == list(range(1, MAX_ASIDE + 2))


def test_any_number_may_wait_for_one_reason_and_it_is_asked_once() -> None:
    line, num_rooms = queue(), 2 * MAX_ASIDE
    asked: list[float] = []

    class Counted(Until):
        def is_over(self, now_s: float) -> bool:
            asked.append(now_s)
            return super().is_over(now_s)

    for room in range(1, num_rooms + 1):
        line.add(request(room))
    reason = Counted(1.0)
    for _ in range(num_rooms):
        line.peek(0.0)
        assert line.set_aside(reason)
    assert not line.bring_back(0.5)
    assert asked == [0.5]
    line.remove(next(line.aside))
    line.bring_back(1.0)
    assert pop_all(line) == list(range(2, num_rooms + 1))


def test_what_is_expected_of_a_request_may_change_while_it_waits() -> None:
    line = queue()
    first, second, stranger = (request(room, length=8) for room in (1, 2, 3))
    line.add(first)
    line.add(second)
    line.expect(second, 5)
    line.expect(stranger, 5)
    assert (line.num_tokens, line.num_prompts) == (11, 2)
    line.expect(second, 8)
    assert (line.num_tokens, line.num_prompts) == (8, 1)
    line.on_admitted(first)
    line.on_admitted(second)
    assert (line.num_tokens, line.num_prompts) == (0, 0)
