"""Who leaves the memory to sessions that have begun, for how long, and who does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tree.pins import Pin
from diptych.engine.schedule.extend_queue import ExtendQueue
from diptych.engine.schedule.lines.session_line import IDLE_S, LOOK_S, MAX_WAIT_S, SessionLine
from diptych.engine.schedule.waiting_queue import new_waiting_queue
from diptych.engine.values.core_report import Holders
from diptych.engine.values.limits import Limits, Scheduling
from diptych.engine.values.request import Request, new_request
from diptych.generation.request_groups import Account, Life
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import NO_SLO, Slo

PAGE = 4
LIMITS = Limits(200, 1 << 20, frozenset(), max_step_tokens=200, max_requests=8)
KEPT = range(100, 164)  # 16 pages of 20
NEW = range(1000, 1032)  # 8 pages


class World:
    """A cache of 20 pages, of which one session, that is away, has 16; a second of computing is 4 tokens."""

    def __init__(self, tenant: str = "a") -> None:
        self._rooms = count(1)
        self.cache = KvCache(num_pages=21, page_size=PAGE, max_requests=8, max_tokens_per_request=200, pin_share=0.9)
        self.cache.compute_s = lambda start, end: (end - start) / PAGE
        self.line = SessionLine(self.cache)
        for _ in range(8):
            self.cache.sessions.habits.ended(tenant)
            self.cache.sessions.habits.called(tenant)
        self.cache.sessions.habits.ended(tenant)
        kept = self.request(KEPT, 0.0, tenant=tenant)
        assert self.cache.admit(kept)
        kept.computed_len = kept.num_tokens
        self.cache.retire(kept)
        self.cache.sessions.called(kept.room, "shell", 0.0)
        assert self.cache.report().pinned_pages == 16
        self.kept = self.cache.tree.end_of(np.array(KEPT, np.int64))

    def request(
        self,
        text: range,
        now_s: float,
        *,
        tenant: str = "a",
        priority: int = 0,
        slo: Slo = NO_SLO,
        until_s: float = math.inf,
    ) -> Request:
        tokens, account, life = np.array(text, np.int64), Account(tenant, priority), Life("", now_s, until_s)
        made = new_request(next(self._rooms), tokens, SamplingParams(max_tokens=4), account=account, life=life, slo=slo)
        self.cache.tree.at(now_s)
        self.cache.sessions.arrived(made, now_s)
        return made

    def holds(self, request: Request, now_s: float, num_waiting: int = 99, *, is_busy: bool = True) -> bool:
        return self.line.holds(request, now_s, num_waiting, is_busy=is_busy)

    def waits_s(self, request: Request, num_waiting: int = 99) -> float:
        """Return for how long a busy worker makes it wait, to a tenth of a second."""
        begun_s = request.life.arrival_s
        return next(n / 10 for n in range(10_000) if not self.holds(request, begun_s + n / 10, num_waiting))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    assert world.cache.audit(Holders()) == []


def test_a_new_session_waits_while_it_would_take_memory_that_is_kept_for_another(world: World) -> None:
    assert world.holds(world.request(NEW, 1.0), 1.0)
    assert not world.holds(world.request(range(1000, 1016), 1.0), 1.0), "as much is free"


def test_who_comes_back_to_a_text_that_is_kept_goes_on(world: World) -> None:
    assert not world.holds(world.request(range(100, 196), 1.0), 1.0)


def test_it_goes_on_as_soon_as_there_is_room(world: World) -> None:
    assert world.holds(world.request(NEW, 1.0), 1.0)
    assert not world.line.is_over(1.5)
    world.cache.tree.unpin(world.kept)
    assert world.line.is_over(1.5)


def test_no_session_waits_for_ever(world: World) -> None:
    """Nine in ten requests of the tenant go on."""
    share = world.cache.sessions.habits.share("a")
    assert share == pytest.approx(0.9)
    assert world.waits_s(world.request(NEW, 1.0)) == pytest.approx(MAX_WAIT_S * share, abs=0.2)


def test_it_waits_no_longer_than_what_it_would_cost_those_in_line(world: World) -> None:
    """Eight pages take 8 s, in each of ten turns; or one page more than there is, in as many."""
    assert world.waits_s(world.request(NEW, 1.0), 0) == pytest.approx(80, abs=0.2)
    assert world.waits_s(world.request(NEW, 1.0), 1) == pytest.approx(160, abs=0.2)
    assert world.waits_s(world.request(range(1000, 1020), 1.0), 0) == pytest.approx(50, abs=0.2)


def test_where_nobody_knows_how_long_computing_takes_the_bound_alone_holds(world: World) -> None:
    world.cache.compute_s = lambda start, end: 0.0
    assert world.waits_s(world.request(NEW, 1.0), 0) > 200


def test_who_calls_no_tools_never_waits() -> None:
    world = World()
    assert world.waits_s(world.request(NEW, 1.0, tenant="chats")) == 0.0
    assert world.holds(world.request(NEW, 1.0), 1.0)


def test_an_objective_a_deadline_and_priority_shorten_the_wait(world: World) -> None:
    plain = world.waits_s(world.request(NEW, 1.0))
    assert world.waits_s(world.request(NEW, 1.0, slo=Slo(2.0))) == pytest.approx(1.0, abs=0.2)
    assert world.waits_s(world.request(NEW, 1.0, until_s=11.0)) == pytest.approx(5.0, abs=0.2)
    assert world.waits_s(world.request(NEW, 1.0, priority=3)) == pytest.approx(plain - 30, abs=0.2)
    assert world.waits_s(world.request(NEW, 1.0, priority=99)) == 0.0
    assert world.waits_s(world.request(NEW, 1.0, priority=-99)) == pytest.approx(plain, abs=0.2)


def test_who_has_run_elsewhere_does_not_wait(world: World) -> None:
    moved = world.request(NEW, 1.0)
    moved.num_prior_output_tokens = 1
    assert not world.holds(moved, 1.0)


def test_a_tenant_with_less_than_an_even_share_of_what_is_kept_does_not_wait(world: World) -> None:
    for _ in range(5):
        world.cache.sessions.habits.ended("b")
        world.cache.sessions.habits.called("b")
    assert not world.holds(world.request(NEW, 1.0, tenant="b"), 1.0), "8 of 18 pages"
    assert world.holds(world.request(range(1000, 1040), 1.0, tenant="b"), 1.0), "10 of 18"


def test_while_nothing_is_computed_one_after_the_other_goes_on(world: World) -> None:
    first, second = world.request(NEW, 1.0), world.request(range(2000, 2032), 1.0)
    assert world.holds(first, 1.0, is_busy=True)
    for step in range(1, 5):
        assert world.holds(first, 1.0 + step, is_busy=False)
    assert not world.holds(first, 1.0 + IDLE_S, is_busy=False)
    assert world.holds(second, 1.0 + IDLE_S, is_busy=False)
    assert world.holds(second, 2.0 + IDLE_S, is_busy=True)
    assert world.holds(second, 3.0 + IDLE_S, is_busy=False), "it has been idle for a second"


def test_those_who_wait_are_looked_at_once_a_second(world: World) -> None:
    assert world.holds(world.request(NEW, 1.0), 1.0)
    assert world.line.until_s == 1.0 + LOOK_S
    assert world.line.is_over(2.0)
    assert world.line.until_s == math.inf, "none is known to wait"


def test_in_a_queue_others_pass_it_and_it_has_its_turn_in_the_end(world: World) -> None:
    """It is told who waits, and for how long they have waited."""
    waiting = new_waiting_queue(world.cache, Scheduling())
    queue = ExtendQueue(world.cache, waiting, LIMITS)
    new = world.request(NEW, 1.0)
    waiting.add(new)
    assert queue.plan(1.0, 200, lambda request: 0) == []
    report = world.cache.report()
    assert (report.held, report.held_now, report.held_s, queue.next_s()) == (1, 1, 0.0, 1.0 + LOOK_S)
    back = world.request(range(100, 168), 1.5)
    waiting.add(back)
    (chunk,) = queue.plan(1.5, 200, lambda request: 0)
    assert chunk.request is back
    queue.remove(back)
    world.cache.drop(back)
    world.cache.tree.at(2.5)
    (chunk,) = queue.plan(2.5, 200, lambda request: 0)
    assert chunk.request is new, "nothing is kept any more"
    report = world.cache.report()
    assert (report.held, report.held_now, report.held_s) == (1, 0, 1.5)
    queue.remove(new)
    world.cache.drop(new)


def test_it_is_counted_once_however_often_it_is_asked(world: World) -> None:
    new = world.request(NEW, 1.0)
    assert world.holds(new, 1.0)
    assert world.holds(new, 2.0)
    assert (world.cache.report().held, world.cache.report().held_now) == (1, 1)


def test_what_a_request_that_runs_has_locked_is_not_taken_off_twice(world: World) -> None:
    assert world.cache.tree.pins.num_resting == 16
    reader = world.request(range(100, 164), 1.0, tenant="b")  # a session of its own, by the same text
    world.cache.tree.pin(world.kept, Pin(None, 0.0, 0.0, 1e9, "a"))
    assert world.cache.admit(reader)
    world.cache.tree.pin(world.kept, Pin(None, 0.0, 0.0, 1e9, "a"))
    assert (world.cache.num_available, world.cache.tree.pins.num_resting) == (4, 0)
    world.cache.drop(reader)


def test_who_leaves_while_it_waits_is_not_counted_as_waiting(world: World) -> None:
    new = world.request(NEW, 1.0)
    assert world.holds(new, 1.0)
    world.cache.sessions.waits_no_more(new)
    assert world.cache.report().held_now == 0
