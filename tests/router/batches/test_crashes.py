"""Whatever dies, and whenever: each line of a batch has one result in its files, and the right one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from batch_world import (
    BATCH,
    LEASE_S,
    NUM_LINES,
    SPEC,
    TENANT,
    Clock,
    Crash,
    Memory,
    Process,
    begun,
    bench,
    check,
    claimed,
    live,
    serve,
    told,
)

from diptych.common.errors import Overloaded
from diptych.router.batches.bench import LineCall
from diptych.router.batches.held import LostHold
from diptych.router.batches.job import Ending
from diptych.router.batches.jobs import Jobs
from diptych.router.batches.log import OPEN
from diptych.router.batches.results import Reply
from diptych.router.batches.runner import BatchRunner
from diptych.router.batches.work import JobWork


def crashes() -> Iterator[tuple[int, bool]]:
    """Yield every moment at which a process can die: before and after each of its calls of the store."""
    memory, clock = Memory(), Clock()
    process = Process(memory)

    async def whole() -> None:
        await begun(memory)
        await live(process, clock, "whole")

    asyncio.run(whole())
    for number in range(process.num_calls):
        yield number, False
        yield number, True


def test_a_death_at_any_call_of_the_store_loses_nothing_and_doubles_nothing() -> None:
    async def story(dies_at: int, is_done: bool) -> None:
        memory, clock = Memory(), Clock()
        await begun(memory)
        with pytest.raises(Crash):
            await live(Process(memory, dies_at, is_done=is_done), clock, "first")
        clock.now_s += LEASE_S + 1
        await live(Process(memory), clock, "second")
        await check(memory)

    moments = list(crashes())
    assert len(moments) > 40
    for moment in moments:
        asyncio.run(story(*moment))


def test_a_second_death_while_the_first_is_made_up_for_changes_nothing() -> None:
    async def story(seed: int) -> None:
        rng, memory, clock = random.Random(seed), Memory(), Clock()
        await begun(memory)
        for number in range(4):
            process = Process(memory, rng.randrange(40), is_done=rng.random() < 0.5)
            try:
                await live(process, clock, f"process {number}")
            except Crash:
                clock.now_s += LEASE_S + 1
        await live(Process(memory), clock, "last")
        await check(memory)

    for seed in range(25):
        asyncio.run(story(seed))


def test_processes_that_all_take_each_other_for_dead_still_give_each_line_one_result() -> None:
    async def story(seed: int) -> int:
        rng, memory, clock = random.Random(seed), Memory(), Clock()
        await begun(memory)
        lost = Counter[str]()

        def pause() -> int:
            clock.now_s += rng.choice((0.0, 1.0, LEASE_S + 1))  # all clocks jump: who pauses has lost its hold
            return rng.randrange(6)

        async def process(name: str) -> None:
            calls = Process(memory, pause=pause)
            for life in range(25):
                try:
                    await live(calls, clock, f"{name} {life}")
                except LostHold:
                    lost[name] += 1
            await asyncio.sleep(0)

        await asyncio.gather(*(process(name) for name in "abc"))
        clock.now_s += LEASE_S + 1
        await live(Process(memory), clock, "last")
        await check(memory)
        return lost.total()

    assert sum(asyncio.run(story(seed)) for seed in range(8)) > 10


def test_a_line_that_is_refused_for_now_is_tried_again() -> None:
    refused: Counter[str] = Counter()

    async def busy(call: LineCall) -> Reply:
        refused[call.request_id] += 1
        if refused[call.request_id] == 1:
            raise Overloaded("not now")
        return await serve(call)

    async def story() -> None:
        memory, clock = Memory(), Clock()
        await begun(memory)
        log = await claimed(Process(memory), clock, "one")
        assert log
        await JobWork(log, bench(Process(memory), clock, busy)).run()
        await check(memory)

    asyncio.run(story())
    assert set(refused.values()) == {2}


@pytest.mark.parametrize("ending", [Ending.CANCELLED, Ending.EXPIRED])
def test_what_was_not_run_is_told_in_the_file_of_errors(ending: Ending) -> None:
    async def story() -> None:
        memory, clock = Memory(), Clock()
        await begun(memory)
        num_served = 0

        async def some(call: LineCall) -> Reply:
            nonlocal num_served
            num_served += 1
            if num_served == 4:
                if ending is Ending.CANCELLED:
                    await Jobs(Process(memory), clock, lambda: None).cancel(TENANT, BATCH)
                else:
                    clock.now_s = SPEC.expires_s
            if num_served >= 4:
                await asyncio.Event().wait()  # until it is stopped
            return await serve(call)

        log = await claimed(Process(memory), clock, "one")
        assert log
        await JobWork(log, bench(Process(memory), clock, some)).run()
        job, output, errors = await told(memory)
        assert job.status == ending.value
        assert sorted(each["custom_id"] for each in (*output, *errors)) == [f"line {n}" for n in range(NUM_LINES)]
        codes = Counter(each["error"]["code"] for each in errors if each["error"])
        assert codes == {f"batch_{ending.value}": NUM_LINES - job.num_done - job.num_failed}
        assert job.num_done + job.num_failed == 3

    asyncio.run(story())


def test_who_leaves_hands_its_batches_over_at_once_with_what_was_done() -> None:
    async def story() -> None:
        memory, clock = Memory(), Clock()
        await begun(memory)
        num_served, is_late = 0, asyncio.Event()

        async def some(call: LineCall) -> Reply:
            nonlocal num_served
            num_served += 1
            if num_served > 4:
                is_late.set()
                await asyncio.Event().wait()  # until it is stopped
            return await serve(call)

        first = BatchRunner(bench(Process(memory), clock, some), "first", 0.0)
        running = asyncio.create_task(first.run())
        await is_late.wait()
        first.leave()
        await running
        job = await Jobs(Process(memory), clock, lambda: None).find(TENANT, BATCH)
        assert (job.num_done + job.num_failed, job.is_free(clock())) == (4, True)
        again: list[str] = []

        async def rest(call: LineCall) -> Reply:
            again.append(call.request_id)
            return await serve(call)

        second = BatchRunner(bench(Process(memory), clock, rest), "second", 0.0)
        running = asyncio.create_task(second.run())
        while await Process(memory).names(OPEN):  # noqa: ASYNC110
            await asyncio.sleep(0)  # nobody tells
        second.leave()
        await running
        await check(memory)
        assert len(again) == NUM_LINES - 4, "what has a result is not run again"

    asyncio.run(story())
