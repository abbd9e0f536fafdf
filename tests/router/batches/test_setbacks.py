"""What goes wrong with one line, batch or object is nobody else's trouble, and ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from batch_world import (
    BATCH,
    INPUT,
    NUM_LINES,
    SPEC,
    TENANT,
    TIMEOUT_S,
    Clock,
    Memory,
    Process,
    begun,
    bench,
    check,
    claimed,
    serve,
    told,
)

from diptych.common.errors import Overloaded
from diptych.router.batches import runner as runner_module
from diptych.router.batches.bench import LineCall
from diptych.router.batches.job import Claimed, Spec
from diptych.router.batches.jobs import Jobs
from diptych.router.batches.log import OPEN, Place
from diptych.router.batches.results import Reply
from diptych.router.batches.runner import BatchRunner
from diptych.router.batches.work import JobWork

CODES = {f"line {number}" for number in range(NUM_LINES)}


async def work(memory: Memory, clock: Clock, served: Callable[[LineCall], Any] = serve) -> None:
    log = await claimed(Process(memory), clock, "one")
    assert log
    await JobWork(log, bench(Process(memory), clock, served)).run()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0)  # nobody tells


def spec_of(number: int, tenant: str) -> Spec:
    return SPEC._replace(
        batch_id=f"batch_{number:036x}", tenant=tenant, input_file_id=f"file-{number:036x}", created_s=float(number)
    )


async def jobs_of(memory: Memory, spec: Spec) -> Any:
    return await Jobs(Process(memory), Clock(), lambda: None).find(spec.tenant, spec.batch_id)


def test_a_line_that_fails_in_a_way_nobody_expects_is_tried_three_times_and_stops_no_other() -> None:
    async def story() -> None:
        memory, clock, tries = Memory(), Clock(), Counter[int]()
        await begun(memory)

        async def some(call: LineCall) -> Reply:
            tries[number := json.loads(call.body)["prompt"]] += 1
            if number == 1:
                raise ZeroDivisionError
            return await serve(call)

        await work(memory, clock, some)
        job, output, errors = await told(memory)
        assert (job.status, job.num_done, job.num_failed) == ("completed", NUM_LINES - 2, 2)
        assert {each["custom_id"]: each["response"]["status_code"] for each in errors} == {"line 1": 500, "line 3": 400}
        assert tries == {number: 3 if number == 1 else 1 for number in range(NUM_LINES)}
        assert len(output) == NUM_LINES - 2

    asyncio.run(story())


@pytest.mark.parametrize("what", ["gone", "shorter", "cancelled"])
def test_a_batch_whose_input_is_lost_ends_with_what_was_done(what: str) -> None:
    async def story() -> None:
        memory, clock, num_served = Memory(), Clock(), 0
        await begun(memory)
        name = f"{Place.of(SPEC).folder}/contents/{INPUT}"

        async def some(call: LineCall) -> Reply:
            nonlocal num_served
            num_served += 1
            if num_served >= 2 and what == "cancelled":
                if num_served == 2:
                    del memory.objects[name]
                    await Jobs(Process(memory), clock, lambda: None).cancel(TENANT, BATCH)
                await asyncio.Event().wait()
            return await serve(call)

        log = await claimed(Process(memory), clock, "one")
        assert log
        validating = JobWork(log, bench(Process(memory), clock, some))
        await validating.run(lambda: False)
        clock.now_s += 1
        assert await log.append(Claimed(clock() + 30), clock())
        if what == "gone":
            del memory.objects[name]
        elif what == "shorter":
            memory.objects[name] = b"\n\n".join(memory.objects[name].split(b"\n\n")[:2])
        await JobWork(log, bench(Process(memory), clock, some)).run()
        job, output, errors = await told(memory)
        ending = "cancelled" if what == "cancelled" else "failed"
        assert job.status == ending
        assert [each.code for each in job.problems] == ([] if what == "cancelled" else ["file_not_found"])
        assert len(output) == job.num_done == {"gone": 0, "shorter": 2, "cancelled": 1}[what]
        (rest,) = errors
        assert rest["error"]["code"] == f"batch_{ending}"
        assert f"{NUM_LINES - job.num_done} requests" in rest["error"]["message"]
        assert await Process(memory).names(OPEN) == []

    asyncio.run(story())


def test_results_that_are_lost_are_told_line_by_line() -> None:
    async def story() -> None:
        memory, clock = Memory(), Clock()
        await begun(memory)
        log = await claimed(Process(memory), clock, "one")
        assert log
        lossy = JobWork(log, bench(Process(memory), clock))
        closing = lossy._close

        async def lose(*args: Any) -> None:
            await closing(*args)
            for name in [name for name in memory.objects if "/parts/" in name]:
                del memory.objects[name]

        lossy._close = lose  # type: ignore[method-assign,assignment]
        await lossy.run()
        _, output, errors = await told(memory)
        assert (output, {each["custom_id"] for each in errors}) == ([], CODES)
        assert {each["error"]["code"] for each in errors} == {"result_lost"}

    asyncio.run(story())


@pytest.mark.parametrize("what", ["entry", "spec"])
def test_what_a_router_can_not_read_stops_neither_it_nor_other_batches(what: str) -> None:
    async def story() -> None:
        memory, clock = Memory(), Clock()
        strange, good = spec_of(1, "other"), SPEC
        await begun(memory, spec=strange)
        place = Place.of(strange)
        newer = json.dumps({"kind": "Newer", "by": "x", "at_s": 0, "token": "t", "body": {}}).encode()
        memory.objects[place.entry(1) if what == "entry" else place.spec] = newer
        await begun(memory, spec=good)
        runner = BatchRunner(bench(Process(memory), clock), "one", 0.0)
        running = asyncio.create_task(runner.run())
        await until(lambda: running.done() or Place.of(good).mark not in memory.objects)
        assert not running.done()
        runner.leave()
        await running
        await check(memory)
        assert place.mark in memory.objects, "who can read it goes on with it"

    asyncio.run(story())


def test_eight_tenants_whose_lines_are_refused_starve_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PATIENCE_S", 0.0)

    async def story() -> None:
        memory, clock = Memory(), Clock()
        for number in range(8):
            await begun(memory, spec=spec_of(number + 1, f"absent {number}"))
        last = SPEC._replace(batch_id=f"batch_{99:036x}")
        await begun(memory, spec=last)

        async def some(call: LineCall) -> Reply:
            if call.tenant != TENANT:
                raise Overloaded("not now")
            return await serve(call)

        runner = BatchRunner(bench(Process(memory), clock, some), "one", 0.0)
        running = asyncio.create_task(runner.run())
        await until(lambda: Place.of(last).mark not in memory.objects)
        runner.leave()
        await running
        assert (await jobs_of(memory, last)).status == "completed"

    asyncio.run(story())


def test_batches_that_wait_for_their_turn_are_validated_cancelled_and_expired_meanwhile() -> None:
    async def story() -> None:
        memory, clock = Memory(), Clock()
        specs = [spec_of(number + 1, TENANT) for number in range(4)]
        specs[3] = specs[3]._replace(window_s=10.0)
        for spec in specs:
            await begun(memory, spec=spec)

        async def hang(call: LineCall) -> Reply:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        runner = BatchRunner(bench(Process(memory), clock, hang), "one", 0.0)
        running = asyncio.create_task(runner.run())
        for spec in specs:
            while not (await jobs_of(memory, spec)).validated_s:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await Jobs(Process(memory), clock, runner.poke).cancel(TENANT, specs[2].batch_id)
        clock.now_s += 20.0
        await until(lambda: all(Place.of(spec).mark not in memory.objects for spec in specs[2:]))
        statuses = [(await jobs_of(memory, spec)).status for spec in specs]
        assert statuses == ["in_progress", "in_progress", "cancelled", "expired"]
        runner.leave()
        await running

    asyncio.run(story())


def test_a_mark_without_a_batch_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "ORPHAN_S", 0.001)

    async def story() -> None:
        memory, clock = Memory(), Clock()
        memory.objects[Place.of(SPEC).mark] = b""
        runner = BatchRunner(bench(Process(memory), clock, monotonic=time.monotonic), "one", 0.0)
        running = asyncio.create_task(runner.run())
        await until(lambda: not memory.objects)
        runner.leave()
        await running

    asyncio.run(asyncio.wait_for(story(), TIMEOUT_S))


def test_while_results_can_not_be_written_no_line_begins_and_none_is_lost() -> None:
    class Full(Process):
        is_full, may_fill = False, True

        async def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.is_full and work == self._store.create:
                raise OSError("no space left")
            return await super().do(work, *args, **kwargs)

    async def story() -> None:
        memory, clock, served = Memory(), Clock(), Counter[str]()
        await begun(memory)
        process = Full(memory)

        async def some(call: LineCall) -> Reply:
            served[call.request_id] += 1
            process.is_full = process.may_fill
            return await serve(call)

        log = await claimed(process, clock, "one")
        assert log
        running = asyncio.create_task(JobWork(log, bench(process, clock, some)).run())
        for _ in range(200):
            await asyncio.sleep(0)
        num_begun = len(served)
        assert not running.done()
        assert num_begun < NUM_LINES
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(served) == num_begun
        process.may_fill = process.is_full = False
        await running
        assert set(served.values()) == {1}, "nothing was run again"
        await check(memory)

    asyncio.run(story())


def test_a_batch_that_is_over_is_shown_without_the_store() -> None:
    async def story() -> None:
        memory, clock = Memory(), Clock()
        await begun(memory)
        await work(memory, clock)
        process = Process(memory)
        jobs = Jobs(process, clock, lambda: None)
        first, num_calls = await jobs.find(TENANT, BATCH), process.num_calls
        assert num_calls
        assert await jobs.find(TENANT, BATCH) == first
        assert process.num_calls == num_calls
        assert first.status == "completed"

    asyncio.run(story())
