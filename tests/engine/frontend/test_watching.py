"""A worker that is watched by who wants to hear of it seldom; its scheduler is played, and time passes at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from fast_loop import FastLoop

from diptych.common.members.roles import Role
from diptych.engine.frontend import group as frontend
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.sessions import Sessions
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.engine.frontend.watchers import LEASE_S, Watchers
from diptych.v1 import bootstrap_pb2, engine_pb2, worker_pb2

STEP_S = 0.25
PROMPTS = TokenizerManager(lambda: pytest.fail("there is no text"), num_threads=1, cache_bytes=0)


class SteppingScheduler:
    """Does a numbered step now and then, and tells of it while it is leased."""

    def __init__(self) -> None:
        self.leased_s: list[float] = []  # when it was asked for a lease

    async def ready(self) -> engine_pb2.SchedulerReady:
        return engine_pb2.SchedulerReady(terms=bootstrap_pb2.Terms(weights="w"), makes_vectors=True)

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        assert commands.watch_s == LEASE_S
        self.leased_s.append(asyncio.get_running_loop().time())

    async def events(self) -> AsyncIterator[engine_pb2.SchedulerEvents]:
        for number in itertools.count(1):
            await asyncio.sleep(STEP_S)
            if self.leased_s and asyncio.get_running_loop().time() < self.leased_s[-1] + LEASE_S:
                steps = worker_pb2.StepRecords(began_s=[0], duration_s=[STEP_S], prompt_tokens=[number])
                yield engine_pb2.SchedulerEvents(news=worker_pb2.WorkerNews(steps=steps, has_links=number == 1))


async def told(interval_s: float, num_words: int) -> tuple[list[float], list[int], list[float]]:
    """Watch; return when each word came, the numbers of all steps in them, and when a lease was asked for."""
    loop, scheduler = asyncio.get_running_loop(), SteppingScheduler()
    record = bootstrap_pb2.Instance(instance_id=1)
    group = WorkerGroup(cast(Any, scheduler), record, Sessions(Role.PREFILL), lambda: None, PROMPTS, 60.0, 60.0)
    await group.load(cast(Any, None))
    relaying = asyncio.create_task(group.relay())
    came_s: list[float] = []
    numbers: list[int] = []
    watch = group.watch(interval_s)
    async for news in watch:
        came_s.append(loop.time())
        numbers += news.steps.prompt_tokens
        if len(came_s) == num_words:
            break
    await watch.aclose()
    relaying.cancel()
    return came_s, numbers, scheduler.leased_s


@pytest.mark.parametrize("interval_s", [0.0, 1.0, 8.0, 60.0])
def test_a_watcher_hears_no_oftener_than_it_wants_and_of_all_steps(
    interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        monkeypatch.setattr(frontend, "Watchers", lambda: Watchers(runner.get_loop().time))
        came_s, numbers, leased_s = runner.run(told(interval_s, 5))
    gaps = [after - before for before, after in itertools.pairwise(came_s)]
    assert gaps == pytest.approx([max(interval_s, STEP_S)] * 4, abs=STEP_S)
    assert numbers == [*range(1, len(numbers) + 1)]
    assert numbers[-1] == int(came_s[-1] / STEP_S + 1e-6)  # the scheduler was leased all the time
    assert all(after - before < LEASE_S for before, after in itertools.pairwise([*leased_s, came_s[-1]]))
