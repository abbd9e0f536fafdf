from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Sequence

import pytest

from diptych.router.admission.queue import (
    MAX_RETRY_AFTER_S,
    MIN_DEPARTED,
    AdmissionLimits,
    AdmissionQueue,
    Admitted,
    Claim,
    Outcome,
    Reason,
    Refused,
)

LIMITS = AdmissionLimits(max_running=2, max_waiting=3, max_wait_s=10.0)


def full_queue(limits: AdmissionLimits = LIMITS) -> AdmissionQueue:
    """All places are taken, by claims 0 and 1."""
    queue = AdmissionQueue(limits)
    for number in range(2):
        assert queue.offer(Claim(), 0.0) == (number, [Admitted(number)])
    return queue


def paced_queue(seconds_per_place: float, limits: AdmissionLimits = LIMITS) -> AdmissionQueue:
    """Claims 2 and 3 run, claim 4 waits; a place came free so often."""
    queue = full_queue(limits)
    for number in range(2, 5):
        assert queue.offer(Claim(), 0.0) == (number, [])
    assert queue.leave(0, 0.0) == [Admitted(2)]
    assert queue.leave(1, seconds_per_place) == [Admitted(3)]
    return queue


def test_what_fits_begins_at_once() -> None:
    queue = full_queue()
    assert (queue.num_running, queue.num_waiting, queue.next_expiry_s) == (2, 0, None)


def test_who_came_first_goes_first() -> None:
    queue = full_queue()
    assert [queue.offer(Claim(), 1.0) for _ in range(2)] == [(2, []), (3, [])]
    assert (queue.leave(1, 2.0), queue.leave(0, 3.0)) == ([Admitted(2)], [Admitted(3)])
    assert (queue.num_running, queue.num_waiting) == (2, 0)


def test_a_higher_priority_goes_before_those_that_wait() -> None:
    queue = full_queue()
    for priority in (0, 5, -1):
        queue.offer(Claim(priority=priority), 1.0)
    assert [queue.leave(number, 2.0) for number in (0, 1, 3)] == [[Admitted(3)], [Admitted(2)], [Admitted(4)]]


def test_nobody_passes_what_needs_several_places() -> None:
    queue = full_queue()
    assert queue.offer(Claim(num_requests=2), 0.0) == (2, [])
    assert queue.offer(Claim(), 0.0) == (3, [])
    assert queue.leave(0, 1.0) == []
    assert queue.leave(1, 2.0) == [Admitted(2)]
    assert queue.leave(2, 3.0) == [Admitted(3)]


def test_who_gives_up_makes_room_for_those_behind() -> None:
    queue = full_queue()
    queue.offer(Claim(num_requests=2), 0.0)
    queue.offer(Claim(), 0.0)
    queue.leave(0, 1.0)
    assert queue.leave(2, 2.0) == [Admitted(3)]


def test_without_a_line_the_next_one_is_refused() -> None:
    queue = full_queue(AdmissionLimits(max_running=2, max_waiting=0, max_wait_s=10.0))
    assert queue.offer(Claim(priority=9), 0.0) == (2, [Refused(2, Reason.FULL, 0.0)])
    assert queue.leave(0, 1.0) == []
    assert queue.offer(Claim(), 1.0) == (3, [Admitted(3)])


def test_a_full_line_refuses_a_newcomer_that_would_be_last() -> None:
    queue = full_queue()
    for _ in range(3):
        queue.offer(Claim(), 0.0)
    assert queue.offer(Claim(), 0.0) == (5, [Refused(5, Reason.FULL, 0.0)])
    assert queue.num_waiting == 3


def test_a_full_line_refuses_its_last_for_a_higher_priority() -> None:
    queue = full_queue()
    for priority in (0, 2, 0):
        queue.offer(Claim(priority=priority), 0.0)
    assert queue.offer(Claim(priority=1), 0.0) == (5, [Refused(4, Reason.DISPLACED, 0.0)])
    assert queue.offer(Claim(priority=1, num_requests=2), 0.0) == (6, [Refused(6, Reason.FULL, 0.0)])
    assert [queue.leave(number, 1.0) for number in (0, 1, 3)] == [[Admitted(3)], [Admitted(5)], [Admitted(2)]]


def test_who_has_waited_for_too_long_is_refused() -> None:
    queue = full_queue()
    queue.offer(Claim(), 1.0)
    queue.offer(Claim(patience_s=4.0), 2.0)
    queue.offer(Claim(patience_s=99.0), 3.0)
    assert queue.next_expiry_s == 6.0
    assert queue.expire(5.9) == []
    assert queue.expire(6.0) == [Refused(3, Reason.EXPIRED, 0.0)]
    assert queue.expire(11.0) == [Refused(2, Reason.EXPIRED, 0.0)]
    assert (queue.next_expiry_s, queue.num_waiting) == (13.0, 1)


def test_a_large_claim_that_expires_no_longer_holds_the_others_up() -> None:
    queue = full_queue()
    queue.offer(Claim(num_requests=2, patience_s=1.0), 0.0)
    queue.offer(Claim(), 0.0)
    queue.leave(0, 0.5)
    assert queue.expire(1.0) == [Refused(2, Reason.EXPIRED, 0.5), Admitted(3)]


def test_who_would_begin_too_late_is_refused_when_it_comes() -> None:
    queue = paced_queue(2.0)
    assert queue.offer(Claim(patience_s=3.5), 2.0) == (5, [Refused(5, Reason.TOO_LATE, 0.5)])
    assert queue.offer(Claim(patience_s=4.0), 2.0) == (6, [])
    assert queue.offer(Claim(patience_s=3.0, priority=1), 2.0) == (7, [])  # it goes first


def test_the_next_try_is_worth_while_when_the_line_will_have_gone() -> None:
    queue = paced_queue(2.0)
    queue.offer(Claim(num_requests=2), 2.0)
    assert queue.offer(Claim(), 2.0) == (6, [Refused(6, Reason.FULL, 6.0)])
    assert paced_queue(90.0).offer(Claim(), 90.0) == (5, [Refused(5, Reason.TOO_LATE, MAX_RETRY_AFTER_S)])


def test_expiries_of_those_who_left_take_no_memory() -> None:
    queue = full_queue()
    for _ in range(1000):
        number, _ = queue.offer(Claim(), 0.0)
        queue.leave(number, 0.0)
        assert queue.next_expiry_s is None
        queue.offer(Claim(), 0.0)
        queue.leave(number + 1, 0.0)
    assert len(queue._expiries._heap) <= MIN_DEPARTED + 1


def test_a_place_that_nobody_missed_says_nothing_of_the_pace() -> None:
    queue = full_queue()
    queue.leave(0, 1.0)
    queue.leave(1, 100.0)
    for _ in range(3):
        queue.offer(Claim(), 100.0)
    queue.leave(2, 101.0)
    queue.offer(Claim(), 101.0)
    assert queue.offer(Claim(), 101.0) == (6, [])


def test_a_pace_that_was_slow_once_is_learned_anew() -> None:
    queue = paced_queue(90.0, AdmissionLimits(max_running=2, max_waiting=8, max_wait_s=10.0))
    taken, now_s, num_refused = [2, 3, 4], 90.0, []
    for _ in range(60):  # bursts of 6, each done in 10 ms
        answers = [queue.offer(Claim(), now_s) for _ in range(6)]
        num_refused.append(sum(isinstance(outcome, Refused) for _, outcomes in answers for outcome in outcomes))
        taken += [number for number, outcomes in answers if not any(isinstance(one, Refused) for one in outcomes)]
        for number in taken:
            now_s += 0.01
            queue.leave(number, now_s)
        taken = []
    assert (num_refused[0], sum(num_refused[40:])) == (6, 0)


def line_of(queue: AdmissionQueue, **counts: int) -> None:
    """So many claims of each tenant wait."""
    for tenant, count in counts.items():
        for _ in range(count):
            queue.offer(Claim(tenant=tenant), 0.0)


def test_a_full_line_is_shared_out_among_those_who_come_and_then_stays_so() -> None:
    queue = full_queue(AdmissionLimits(max_running=2, max_waiting=8, max_wait_s=10.0))
    line_of(queue, alice=8)
    for bobs in range(4):
        number, outcomes = queue.offer(Claim(tenant="bob"), 0.0)
        assert outcomes == [Refused(9 - bobs, Reason.OVER_SHARE, 0.0)]  # alice's newest
    for tenant in ("alice", "bob"):
        number, outcomes = queue.offer(Claim(tenant=tenant), 0.0)
        assert outcomes == [Refused(number, Reason.FULL, 0.0)]


def test_a_tenant_of_many_takes_no_place_in_line_from_one_of_few() -> None:
    queue = full_queue()
    line_of(queue, bob=1, alice=2)
    number, outcomes = queue.offer(Claim(num_requests=3, tenant="alice"), 0.0)
    assert outcomes == [Refused(number, Reason.FULL, 0.0)]
    number, outcomes = queue.offer(Claim(tenant="alice", priority=1), 0.0)  # that only a higher priority does
    assert outcomes == [Refused(4, Reason.DISPLACED, 0.0)]


def test_who_comes_in_time_by_its_tenants_turn_is_let_in_behind_a_flood() -> None:
    queue = paced_queue(2.0, AdmissionLimits(max_running=2, max_waiting=50, max_wait_s=10.0))
    line_of(queue, alice=4)  # the last one is expected to begin in time
    assert [queue.offer(Claim(tenant=each), 2.0)[1][:1] for each in ("alice", "bob")] == [
        [Refused(9, Reason.TOO_LATE, 2.0)],
        [],
    ]


def flood(*clients: str, max_running: int = 4, max_waiting: int = 8) -> Counter[str]:
    """Return how many requests of each tenant were served, of 400: clients ask again as soon as they were answered.

    A place comes free every 50 ms; between two of them everybody has asked.
    """
    queue = AdmissionQueue(AdmissionLimits(max_running, max_waiting, max_wait_s=5.0))
    idle, served, now_s = list(enumerate(clients)), Counter[str](), 0.0
    owners: dict[int, tuple[int, str]] = {}
    running: deque[int] = deque()

    def on_outcomes(outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Admitted):
                running.append(outcome.number)
                served[owners[outcome.number][1]] += 1
            else:
                idle.append(owners.pop(outcome.number))

    while served.total() < 400:
        now_s += 0.05
        asking, idle[:] = list(idle), []
        for client in asking:
            owners[queue._next_number] = client
            on_outcomes(queue.offer(Claim(tenant=client[1]), now_s)[1])
        on_outcomes(queue.expire(now_s))
        idle.append(owners.pop(done := running.popleft()))
        on_outcomes(queue.leave(done, now_s))
    return served


def test_a_flood_of_one_tenant_leaves_another_its_half() -> None:
    served = flood(*["alice"] * 40, *["bob"] * 8)
    assert abs(served["alice"] - served["bob"]) <= 4 + 1  # the first places went to who came first


def test_a_tenant_with_one_request_at_a_time_gets_its_turn_each_time() -> None:
    served = flood(*["alice"] * 40, *["bob"] * 40, "carol")
    assert served["carol"] >= 400 // 8  # one runs for four turns, and waits for two at most
    assert abs(served["alice"] - served["bob"]) <= 4 + 1


def test_a_tenant_alone_uses_all_places() -> None:
    assert flood(*["alice"] * 12)["alice"] >= 400


@pytest.mark.parametrize("seed", range(20))
def test_every_claim_is_answered_once_and_no_place_is_lost(seed: int) -> None:
    rng, now_s = random.Random(seed), 0.0
    queue = AdmissionQueue(AdmissionLimits(max_running=5, max_waiting=8, max_wait_s=3.0))
    counts: dict[int, int] = {}
    running: set[int] = set()
    waiting: set[int] = set()

    def on_outcomes(outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.number in waiting
            waiting.remove(outcome.number)
            if isinstance(outcome, Admitted):
                running.add(outcome.number)

    for _ in range(300):
        now_s += rng.random() / 3
        move = rng.random()
        if move < 0.5:
            claim = Claim(rng.randint(1, 4), rng.randint(-1, 1), rng.choice([0.5, 2.0, 9.0]), rng.choice("abc"))
            number, outcomes = queue.offer(claim, now_s)
            counts[number] = claim.num_requests
            waiting.add(number)
            on_outcomes(list(outcomes))
        elif move < 0.9 and (running or waiting):
            number = rng.choice(sorted(running | waiting))
            running.discard(number)
            waiting.discard(number)
            on_outcomes(list(queue.leave(number, now_s)))
        else:
            on_outcomes(list(queue.expire(now_s)))
        assert queue.num_running == sum(counts[number] for number in running) <= 5
        assert queue.num_waiting == sum(counts[number] for number in waiting) <= 8
    for number in sorted(running | waiting):
        queue.leave(number, now_s)
    assert (queue.num_running, queue.num_waiting) in {(0, 0)}


def test_tiers_that_are_not_sheddable_go_first_then_heavier_ones_whatever_the_priorities() -> None:
    queue = full_queue(AdmissionLimits(max_running=2, max_waiting=9, max_wait_s=10.0))
    for weight, priority in ((0.1, 9), (0.5, 9), (math.inf, -9), (0.5, 10), (math.inf, 0)):
        queue.offer(Claim(weight=weight, priority=priority), 1.0)
    admitted = [queue.leave(number, 2.0) for number in (0, 1, 6, 4, 5)]
    assert admitted == [[Admitted(number)] for number in (6, 4, 5, 3, 2)]


@pytest.mark.parametrize("seed", range(10))
def test_a_full_line_refuses_nobody_while_somebody_lighter_waits(seed: int) -> None:
    rng = random.Random(seed)
    queue = full_queue(AdmissionLimits(max_running=2, max_waiting=8, max_wait_s=1e9))
    weights: dict[int, float] = {}  # of those that wait
    for _ in range(200):
        claim = Claim(weight=rng.choice((0.1, 0.5, math.inf)), priority=rng.randrange(-3, 4), tenant=rng.choice("ab"))
        number, outcomes = queue.offer(claim, 1.0)
        weights[number] = claim.weight
        for refused in outcomes:
            assert isinstance(refused, Refused)
            weight = weights.pop(refused.number)
            assert all(weight <= other for other in weights.values())
            if refused.number != number and weight < claim.weight:
                assert refused.reason is Reason.SHED
