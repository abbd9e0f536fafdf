from __future__ import annotations

import itertools

import numpy as np
import pytest

from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Scheduling
from diptych.engine.policies import POLICIES
from diptych.engine.request import Request, new_request
from diptych.engine.sampling_params import SamplingParams
from diptych.engine.waiting_queue import WaitingQueue, new_waiting_queue


def request(room: int, tenant: str = "", arrival_s: float = 0.0, priority: int = 0, length: int = 8) -> Request:
    prompt = np.arange(length) + 100 * room
    params = SamplingParams(max_tokens=4)
    return new_request(room, prompt, params, tenant=tenant, arrival_s=arrival_s, priority=priority)


def queue(policy: str = "fcfs", **weights: float) -> WaitingQueue:
    cache = KvCache(num_pages=65, page_size=4, max_requests=8, max_tokens_per_request=64)
    return new_waiting_queue(cache, Scheduling(policy, tenant_weights=weights))


def take_all(queue: WaitingQueue, now_s: float = 0.0) -> list[int]:
    rooms = []
    while queue:
        request = queue.peek(now_s)
        queue.take(request)
        rooms.append(request.room)
    return rooms


def test_equal_requests_keep_their_order() -> None:
    line = queue()
    for room in (5, 3, 4):
        line.add(request(room))
    assert take_all(line) == [5, 3, 4]


def test_tenants_take_turns_however_many_requests_one_sends() -> None:
    line = queue()
    for room in range(1, 7):
        line.add(request(room, "many"))
    line.add(request(7, "few"))
    line.add(request(8, "few"))
    assert take_all(line) == [1, 7, 2, 8, 3, 4, 5, 6]


def test_a_heavier_tenant_gets_more_turns() -> None:
    line = queue(gold=2.0)
    for room in range(1, 7):
        line.add(request(room, "gold" if room % 2 else "free"))
    assert take_all(line) == [1, 2, 3, 5, 4, 6]


def test_priority_orders_a_tenants_own_requests_only() -> None:
    line = queue("priority")
    line.add(request(1, "a"))
    line.add(request(2, "a", priority=5))
    line.add(request(3, "b"))
    assert take_all(line) == [2, 3, 1]


def test_retracted_requests_go_first_the_last_one_at_the_head() -> None:
    line = queue("priority")
    line.add(request(1, priority=9))
    line.add_first(request(2))
    line.add_first(request(3))
    assert take_all(line) == [3, 2, 1]


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
    assert take_all(line) == [7, 4, 6]
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
        line.take(served)
        if served.room == 1:
            return
    raise AssertionError("starved")
