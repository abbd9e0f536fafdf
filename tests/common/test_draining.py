"""Departures seen through, over work whose end the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from diptych.common.draining import Draining
from diptych.common.event_loop import Stop
from diptych.common.verdicts.drain import DrainProgress, Phase

LONG_S = 60.0


class Job:
    """Implements `Work`: one request, which ends when told, or when handed back."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.was_handed_back = False
        self.oldest_s = 7.0

    @property
    def num_left(self) -> int:
        return 0 if self.done.is_set() else 1

    async def wait_until_none(self) -> None:
        await self.done.wait()

    async def hand_back(self) -> None:
        self.was_handed_back = True
        self.done.set()


def play(scene: Callable[[Draining, Job], Awaitable[None]]) -> Job:
    """Run a scene beside a departure that must come to its end."""

    async def together() -> Job:
        job = Job()
        draining = Draining(job)
        running = asyncio.ensure_future(draining.run())
        await scene(draining, job)
        await asyncio.wait_for(running, 60)
        assert draining.progress().phase in (Phase.EMPTY, Phase.GONE)
        return job

    return asyncio.run(together())


def test_what_ends_in_time_is_not_handed_back() -> None:
    async def scene(draining: Draining, job: Job) -> None:
        draining.ask(LONG_S)
        job.done.set()

    assert not play(scene).was_handed_back


def test_what_does_not_end_in_time_is_handed_back() -> None:
    async def scene(draining: Draining, job: Job) -> None:
        draining.ask(0.01)

    assert play(scene).was_handed_back


def test_a_second_question_shortens_the_wait() -> None:
    async def scene(draining: Draining, job: Job) -> None:
        draining.ask(LONG_S)
        await asyncio.sleep(0)
        draining.ask(0.01)

    assert play(scene).was_handed_back


def test_progress_counts_what_is_left_from_the_first_question_on() -> None:
    async def scene(draining: Draining, job: Job) -> None:
        assert not draining.has_begun
        draining.ask(LONG_S)
        progress = draining.progress()
        assert progress == DrainProgress(Phase.DRAINING, 1, 7.0, progress.deadline_s)
        assert 0 < progress.deadline_s <= LONG_S
        draining.hurry()

    assert play(scene).was_handed_back


def test_the_first_signal_begins_and_the_second_hurries() -> None:
    async def scene(draining: Draining, job: Job) -> None:
        stop = Stop()
        leaving = asyncio.ensure_future(draining.leave_on(stop, LONG_S))
        stop.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert draining.has_begun
        assert not job.was_handed_back
        stop.hurry.set()
        await asyncio.wait_for(leaving, 60)
        assert draining.progress().phase is Phase.GONE

    assert play(scene).was_handed_back


def test_nothing_new_is_taken_from_the_first_question_on_and_only_once() -> None:
    async def scene() -> list[str]:
        begun: list[str] = []
        draining = Draining(Job(), lambda: begun.append("begun"))
        draining.ask(LONG_S)
        draining.ask(LONG_S)
        draining.hurry()
        await draining.run()
        return begun

    assert asyncio.run(scene()) == ["begun"]


class StuckJob(Job):
    """Holds on to what it has handed back."""

    async def hand_back(self) -> None:
        self.was_handed_back = True


def leave_from_stuck_job(*, asked_before: bool) -> tuple[bool, bool, Phase]:
    """Stop a process whose work never lets go; return whether it handed back, came to be empty, and where it is."""

    async def scene() -> tuple[bool, bool, Phase]:
        job, stop = StuckJob(), Stop()
        draining = Draining(job)
        running = asyncio.ensure_future(draining.run())
        if asked_before:
            draining.ask(0.0)
            await asyncio.sleep(0.02)
            assert draining.progress().phase is Phase.HANDING_BACK
        stop.set()
        async with asyncio.timeout(60):
            await draining.leave_on(stop, 0.0, release_s=0.05)
        running.cancel()
        return job.was_handed_back, draining.empty.is_set(), draining.progress().phase

    return asyncio.run(scene())


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_process_that_is_told_to_stop_does_not_wait_for_ever_for_what_does_not_let_go(asked_before: bool) -> None:
    assert leave_from_stuck_job(asked_before=asked_before) == (True, False, Phase.GONE)
