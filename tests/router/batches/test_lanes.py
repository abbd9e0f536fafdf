"""A batch of several models: lines that stand still keep no others from running, and come to their turn."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest
from batch_world import INPUT, SPEC, TIMEOUT_S, Clock, Memory, Process, bench, claimed, line, serve, told

from diptych.common.errors import Unavailable
from diptych.router.batches import lanes as lanes_module
from diptych.router.batches.bench import LineCall
from diptych.router.batches.files import FileFacts, Files
from diptych.router.batches.jobs import Jobs
from diptych.router.batches.lanes import MAX_LANES, Lanes
from diptych.router.batches.results import Reply
from diptych.router.batches.slots import Slot
from diptych.router.batches.work import JobWork


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "STILL_S", 0.01)
    monkeypatch.setattr(lanes_module, "REREAD_S", 0.0)


async def begun_with(memory: Memory, models: list[str]) -> None:
    """Make a batch whose lines name these models."""
    process, said = Process(memory), [line(number) for number in range(len(models))]
    for model, each in zip(models, said, strict=True):
        each["body"]["model"] = model
    text = "\n".join(map(json.dumps, said)).encode()
    async with Files(process).upload(SPEC.tenant, SPEC.input_file_id) as upload:
        await upload.write(text)
        await upload.keep(FileFacts(INPUT, len(text), 0.0, "in.jsonl", "batch"))
    await Jobs(process, Clock(), lambda: None).create(SPEC)


def test_lines_of_a_model_that_is_away_stop_no_others_and_run_when_it_is_back() -> None:
    async def story() -> None:
        memory, clock, served, is_back = Memory(), Clock(), Counter[Any](), False
        models = [*["away"] * 9, *["here"] * 5, "away"]
        await begun_with(memory, models)

        async def some(call: LineCall) -> Reply:
            model = json.loads(call.body)["model"]
            if model == "away" and not is_back:
                raise Unavailable("no worker is there")
            served[model] += 1
            return await serve(call)

        log = await claimed(Process(memory), clock, "one")
        assert log
        running = asyncio.create_task(JobWork(log, bench(Process(memory), clock, some, time.monotonic)).run())
        while served["here"] < 5:
            await asyncio.sleep(0)
            assert not running.done()
        assert served == {"here": 5}
        is_back = True
        await running
        assert served == {"here": 5, "away": 10}, "each once"
        job, output, errors = await told(memory)
        assert (job.status, len(output), len(errors)) == ("completed", 14, 1)

    asyncio.run(asyncio.wait_for(story(), TIMEOUT_S))


def test_a_file_that_names_one_model_is_read_on_only_as_its_lines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "REREAD_S", 1000.0)  # that is for files of several

    async def story() -> None:
        lanes = Lanes(1, lambda: 100.0 * next(ticks))  # whatever is held stands still
        lane = lanes.lane("m")
        lanes.begin_reading()
        assert await lanes.has_room(lane)
        lanes.hold(lane)
        assert not await lanes.has_room(lane), "there may be others"
        reading = asyncio.create_task(lanes.end_reading())
        await asyncio.sleep(0)
        assert not reading.done()
        lanes.release(lane)
        assert await reading
        lanes.begin_reading()
        lanes.hold(lane)
        waiting = asyncio.create_task(lanes.has_room(lane))
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not waiting.done(), "there are none: it waits, and nothing is read in vain"
        lanes.release(lane)
        assert await waiting
        assert not await lanes.end_reading()

    ticks = iter(range(1000))
    asyncio.run(asyncio.wait_for(story(), TIMEOUT_S))


def test_lines_wait_for_a_model_that_makes_output_or_has_just_answered() -> None:
    now_s = 0.0
    lane = Lanes(1, lambda: now_s).lane("m")
    slot = Slot(lambda: None)
    assert not lane.stands_still(0.0)
    with lane.serving(slot):
        assert lane.stands_still(1.0)
        slot.answered()
        assert not lane.stands_still(1.0)
    assert lane.stands_still(1.0)


def test_lines_that_have_just_begun_do_not_stand_still_however_long_there_were_none() -> None:
    now_s = 0.0
    lanes = Lanes(2, lambda: now_s)
    lane = lanes.lane("m")
    now_s = 100.0
    assert lane.stands_still(now_s)
    lanes.hold(lane)
    assert not lane.stands_still(now_s)
    now_s = 200.0
    lanes.hold(lane)
    assert lane.stands_still(now_s), "a second line is no answer"


def test_names_that_clients_think_of_share_a_lane_beyond_a_count() -> None:
    lanes = Lanes(1, lambda: 0.0)
    assert len({lanes.lane(f"model {number}") for number in range(100)}) == MAX_LANES + 1
