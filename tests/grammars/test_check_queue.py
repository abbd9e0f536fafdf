from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.grammars.check_queue import MANY_DEBTORS, CheckQueue, QueueLimits, Refused

UNLIMITED = QueueLimits(2**62, 2**62, math.inf, math.inf, 1.0)
LIMITS = QueueLimits(max_waiting=6, max_tenant_waiting=3, free_s=0.5, max_debt_s=2.0, payback=0.25)


def offer(queue: CheckQueue, tenant: str, now_s: float = 0.0) -> int:
    number = queue.offer(tenant, now_s)
    assert isinstance(number, int)
    return number


def test_tenants_take_turns_however_many_checks_each_has() -> None:
    queue = CheckQueue(UNLIMITED)
    many = [offer(queue, "many") for _ in range(3)]
    few = [offer(queue, "few") for _ in range(2)]
    taken = []
    for _ in range(5):
        taken.append(queue.pop())
        queue.finish(taken[-1] or 0, 0.0, 0.0)
    assert taken == [many[0], few[0], many[1], few[1], many[2]]


def test_a_tenant_has_one_check_at_a_time() -> None:
    queue = CheckQueue(UNLIMITED)
    first, second = (offer(queue, "a") for _ in range(2))
    assert (queue.pop(), queue.pop()) == (first, None)
    other = offer(queue, "b")
    assert (queue.pop(), queue.pop()) == (other, None)
    queue.finish(first, 0.0, 0.0)
    assert queue.pop() == second


def test_the_places_are_bounded_for_each_tenant_and_for_all() -> None:
    queue = CheckQueue(LIMITS)
    for tenant in ("a", "a", "a", "b", "b"):
        offer(queue, tenant)
    assert queue.offer("a", 0.0) == Refused(True, 1.0)
    offer(queue, "b")
    assert queue.offer("c", 0.0) == Refused(False, 1.0)


def test_who_owes_too_much_is_turned_away_until_it_is_paid_back() -> None:
    queue = CheckQueue(LIMITS)
    bomb, waiting, other = offer(queue, "a"), offer(queue, "a"), offer(queue, "b")
    assert queue.pop() == bomb
    assert queue.finish(bomb, 3.5, 10.0) == ((waiting,), 4.0)  # owes 3 s, may owe 2, pays 1 in 4
    assert queue.offer("a", 12.0) == Refused(True, 2.0)
    assert queue.pop() == other
    offer(queue, "a", 14.0)


def test_short_checks_are_free() -> None:
    queue = CheckQueue(LIMITS)
    for _ in range(1000):
        number = offer(queue, "a")
        queue.pop()
        assert queue.finish(number, 0.5, 0.0) == ((), 0.0)


def test_a_tenant_of_bombs_gets_its_share_of_the_time_and_no_more() -> None:
    queue, now_s, spent_s = CheckQueue(LIMITS), 0.0, 0.0
    while now_s < 1000:
        number = queue.offer("a", now_s)
        if isinstance(number, Refused):
            now_s += number.retry_after_s
            continue
        queue.pop()
        now_s += 1.0
        spent_s += 1.0
        queue.finish(number, 1.0, now_s)
    assert spent_s <= 1000 * LIMITS.payback * 2 + 5  # half of each such check is free


def test_a_tenant_owes_what_comes_after_its_checks_too_and_pays_it_back() -> None:
    queue = CheckQueue(LIMITS)
    queue.charge("a", LIMITS.max_debt_s, 0.0)
    assert not queue.owes_too_much("a", 0.0)
    queue.charge("a", 1.0, 0.0)
    assert queue.owes_too_much("a", 0.0)
    assert queue.offer("a", 0.0) == Refused(True, 1.0 / LIMITS.payback)
    assert offer(queue, "b") == 0
    assert not queue.owes_too_much("a", 1.0 / LIMITS.payback)


def test_debts_of_many_tenants_are_not_all_remembered() -> None:
    queue = CheckQueue(LIMITS)
    for index in range(3 * MANY_DEBTORS):
        number = offer(queue, f"t{index}")
        queue.pop()
        queue.finish(number, 9.0 if index == 0 else 1.0, 0.0)
    assert len(queue._debts) <= MANY_DEBTORS
    assert isinstance(queue.offer("t0", 0.0), Refused), "who owes most is not forgotten"


class Machine(RuleBasedStateMachine):
    """Against a plain list of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = CheckQueue(LIMITS)
        self.waiting: dict[int, str] = {}
        self.running: dict[int, str] = {}
        self.now_s = 0.0

    @rule(tenant=st.sampled_from("abc"), later_s=st.floats(0, 5))
    def offers(self, tenant: str, later_s: float) -> None:
        self.now_s += later_s
        number = self.queue.offer(tenant, self.now_s)
        if isinstance(number, Refused):
            assert number.retry_after_s > 0
            return
        assert number not in self.waiting
        assert number not in self.running
        self.waiting[number] = tenant

    @rule()
    def pops(self) -> None:
        number = self.queue.pop()
        if number is None:
            assert set(self.waiting.values()) <= set(self.running.values()), "somebody could have begun"
            return
        tenant = self.waiting.pop(number)
        assert tenant not in self.running.values()
        assert number < min([other for other, whose in self.waiting.items() if whose == tenant], default=number + 1)
        self.running[number] = tenant

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drops(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        self.queue.drop(number)
        del self.waiting[number]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), took_s=st.floats(0, 4))
    def finishes(self, data: st.DataObject, took_s: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        tenant = self.running.pop(number)
        turned_away, wait_s = self.queue.finish(number, took_s, self.now_s)
        assert (wait_s > 0) >= bool(turned_away)
        for waiting in turned_away:
            assert self.waiting.pop(waiting) == tenant
        if wait_s:
            assert tenant not in self.waiting.values()

    @invariant()
    def counts(self) -> None:
        assert self.queue.num_waiting == len(self.waiting) <= LIMITS.max_waiting
        assert self.queue.num_running == len(self.running)
        assert set(self.queue._tenants) == {*self.waiting, *self.running}


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None)
