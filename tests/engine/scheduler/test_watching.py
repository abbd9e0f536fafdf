"""What a scheduler tells who watches it, and how often."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.schedule.step_log import LoggedStep, LoggedSteps, StepSize
from diptych.engine.scheduler.links.links import links_of_nobody
from diptych.engine.scheduler.news import News
from diptych.engine.scheduler.watching import AUDIT_S, INTERVAL_S, LINKS_S, MAX_LEASE_S, Watching, steps_to_wire
from diptych.engine.values.events import Crossing
from diptych.v1.engine_pb2 import SchedulerEvents
from diptych.v1.worker_pb2 import StepMark, StepRecords, WorkerNews


class Scheduler:
    """A scheduler that is watched, by a clock that stands still."""

    def __init__(self, engine: Any) -> None:
        nobody: Any = SimpleNamespace(turns=AdapterTurns(0))
        self.engine = engine
        self.log = PrefillMeter().log
        news = News(engine.core, engine.cache, links_of_nobody(), nobody, PrefillMeter())
        self.watching = Watching(news, self.log)

    def watch(self, lease_s: float) -> None:
        """Somebody begins to watch, at 0 s."""
        self.watching.renew(lease_s, 0.0)
        self.watching.tell_all(0.0)

    def news(self, now_s: float) -> WorkerNews | None:
        events = SchedulerEvents()
        if self.log.is_on:
            self.watching.report(events, now_s)
        return events.news if events.HasField("news") else None

    def times(self, until_s: float, step_s: float = 0.01) -> list[float]:
        """Return when it told something, asked all the time."""
        moments = [number * step_s for number in range(round(until_s / step_s))]
        return [now_s for now_s in moments if self.news(now_s)]


@pytest.fixture
def scheduler(new_engine: Callable[..., Any]) -> Scheduler:
    return Scheduler(new_engine())


def test_nobody_is_told_anything_who_does_not_watch(scheduler: Scheduler) -> None:
    assert (scheduler.watching.next_s, scheduler.times(5.0)) == (None, [])


def test_a_watch_is_answered_at_once_and_then_four_times_a_second(scheduler: Scheduler) -> None:
    scheduler.watch(100.0)
    times = scheduler.times(2.0)
    assert times[0] == 0.0
    assert len(times) == round(2.0 / INTERVAL_S)
    assert scheduler.watching.next_s == pytest.approx(2.0)


def test_a_watch_that_nobody_renews_ends_by_itself_and_costs_nothing_then(scheduler: Scheduler) -> None:
    scheduler.watch(1.0)
    assert max(scheduler.times(3.0)) < 1.0
    assert (scheduler.log.is_on, scheduler.watching.next_s) == (False, None)


def test_a_watch_that_is_renewed_goes_on(scheduler: Scheduler) -> None:
    scheduler.watch(1.0)
    scheduler.news(0.0)
    scheduler.watching.renew(1.0, 0.9)
    assert scheduler.news(1.5) is not None
    assert scheduler.news(1.9) is None


def test_no_lease_is_longer_than_the_longest(scheduler: Scheduler) -> None:
    scheduler.watch(1e9)
    assert scheduler.news(MAX_LEASE_S) is None
    assert not scheduler.log.is_on


def test_links_are_told_once_a_second(scheduler: Scheduler) -> None:
    scheduler.watch(100.0)
    told = [scheduler.news(number * INTERVAL_S) for number in range(9)]
    assert [news.has_links for news in told if news] == [number * INTERVAL_S % LINKS_S == 0 for number in range(9)]


def test_the_cache_is_audited_now_and_then(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    audits: list[Any] = []

    def audit(holders: Any) -> list[str]:
        audits.append(holders)
        return [f"problem {len(audits)}"]

    monkeypatch.setattr(scheduler.engine.cache, "audit", audit)
    scheduler.watch(MAX_LEASE_S)
    told = [scheduler.news(now_s) for now_s in (0.0, 10.0, 20.0)]
    scheduler.watching.renew(MAX_LEASE_S, 20.0)
    told.append(scheduler.news(AUDIT_S))
    found = [(list(news.status.problems), news.status.leaks_found) for news in told if news]
    assert found == [(["problem 1"], 1)] * 3 + [(["problem 2"], 1)]


def test_steps_are_told_by_how_long_ago_they_began() -> None:
    steps = [
        LoggedStep(10.0, 0.5, StepSize(100, 1, 2, 40, 5000.0, 1)),
        LoggedStep(10.5, 0.25, StepSize(0, 3, 3, 200), host_s=0.125),
    ]
    noted = LoggedSteps(steps, [(Crossing.HANDED, 0, 7), (Crossing.JOINED, 1, 8)], num_dropped=4)
    assert steps_to_wire(noted, 12.0) == StepRecords(
        began_s=[2.0, 1.5],
        duration_s=[0.5, 0.25],
        prompt_tokens=[100, 0],
        output_tokens=[1, 3],
        requests=[2, 3],
        context_tokens=[40, 200],
        prompt_pairs=[5000.0, 0.0],
        prompts=[1, 0],
        host_s=[0.0, 0.125],
        handed=[StepMark(step=0, room=7)],
        joined=[StepMark(step=1, room=8)],
        dropped=4,
    )


def test_who_begins_to_watch_while_others_do_hears_all_at_once(scheduler: Scheduler) -> None:
    scheduler.watch(100.0)
    scheduler.news(0.0)
    assert scheduler.news(0.1) is None
    scheduler.watching.tell_all(0.1)
    told = scheduler.news(0.1)
    assert told is not None
    assert told.has_links


def test_each_step_is_told_once(scheduler: Scheduler) -> None:
    scheduler.watch(100.0)
    scheduler.news(0.0)
    scheduler.log.add(LoggedStep(0.1, 0.1, StepSize(0, 1, 1)))
    told = [scheduler.news(now_s) for now_s in (0.2, 0.3, 0.6)]
    assert [list(news.steps.output_tokens) if news else None for news in told] == [None, [1], []]
