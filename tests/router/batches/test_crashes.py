"""Whatever dies, and whenever: each line of a batch has one result in its files, and the right one."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import orjson
import pytest

from diptych.common.errors import Overloaded
from diptych.router.batches.files import FileFacts, Files
from diptych.router.batches.idle import Busy
from diptych.router.batches.job import Claimed, Ending, Job, Spec
from diptych.router.batches.jobs import Jobs
from diptych.router.batches.log import OPEN, JobLog
from diptych.router.batches.results import Reply
from diptych.router.batches.runner import BatchRunner
from diptych.router.batches.slots import Slots
from diptych.router.batches.store import StoreCalls
from diptych.router.batches.work import Bench, JobWork, LineCall, LostHold

T = TypeVar("T")

URL = "/v1/completions"
LEASE_S = 30.0
TENANT = "someone"
INPUT = f"file-{'0' * 36}"
BATCH = f"batch_{'0' * 36}"
NUM_LINES = 7
BAD = 3  # the line that the endpoint refuses
SPEC = Spec(BATCH, TENANT, URL, INPUT, 0.0, 86400.0, "24h", None)


class Crash(Exception):
    """The process has been killed."""


class AtOnce(random.Random):
    """Draws pauses."""

    def uniform(self, a: float, b: float) -> float:
        return 0.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


class Writer:
    def __init__(self, objects: dict[str, bytes], name: str) -> None:
        self._objects, self._name, self._data = objects, name, b""

    def write(self, data: bytes) -> None:
        self._data += data

    def close(self) -> None:
        self._objects[self._name] = self._data

    def abort(self) -> None:
        pass


class Memory:
    """A store that survives."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> bool:
        return self.objects.setdefault(name, data) is data

    def writer(self, name: str) -> Writer:
        return Writer(self.objects, name)

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name][start:][:nbytes]

    def names(self, folder: str) -> list[str]:
        return [name.rpartition("/")[2] for name in self.objects if name.startswith(f"{folder}/")]

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


class Process(StoreCalls):
    """A process's way to the store. It dies at its call number `dies_at`, before or after that has been done."""

    def __init__(
        self, memory: Memory, dies_at: int = -1, *, is_done: bool = False, pause: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__(memory)
        self._dies_at, self._is_done, self._pause = dies_at, is_done, pause
        self.num_calls = 0

    async def do(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        for _ in range(self._pause()):
            await asyncio.sleep(0)
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number == self._dies_at and self._is_done:
            work(*args, **kwargs)
        if 0 <= self._dies_at <= number:
            raise Crash
        return work(*args, **kwargs)


async def serve(call: LineCall) -> Reply:
    """Recite the prompt; the `BAD` one is refused."""
    await asyncio.sleep(0)
    call.slot.answered()
    number = json.loads(call.body)["prompt"]
    return Reply(400 if number == BAD else 200, orjson.dumps({"said": number}))


def bench(process: Process, clock: Clock, serve: Callable[[LineCall], Any] = serve) -> Bench:
    slots = Slots(2, lambda num_prompts: Busy(0, 0, 8, 0, num_prompts, 0, 8, 1.0, False))
    return Bench(process, Files(process), slots, serve, clock, LEASE_S, 1000, 0.0, rng=AtOnce())


def line(number: int) -> dict[str, Any]:
    return {"custom_id": f"line {number}", "method": "POST", "url": URL, "body": {"prompt": number}}


async def begun(memory: Memory, lines: int = NUM_LINES) -> None:
    """Upload an input, and make a batch of it."""
    process = Process(memory)
    text = b"\n\n".join(json.dumps(line(number)).encode() for number in range(lines))
    async with Files(process).upload(TENANT, INPUT) as upload:
        await upload.write(text)
        await upload.keep(FileFacts(INPUT, len(text), 0.0, "in.jsonl", "batch"))
    await Jobs(process, Clock(), lambda: None).create(SPEC)


async def claimed(process: Process, clock: Clock, name: str) -> JobLog | None:
    """Return the log of the batch, if this process holds it now."""
    log = JobLog(process, SPEC, name)
    await log.read_on()
    is_mine = log.job.is_free(clock()) and await log.append(Claimed(clock() + LEASE_S), clock())
    return log if is_mine else None


async def live(process: Process, clock: Clock, name: str) -> None:
    """Do all of the batch, or die."""
    if log := await claimed(process, clock, name):
        await JobWork(log, bench(process, clock)).run()


async def told(memory: Memory) -> tuple[Job, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the batch, and what its files say."""
    process = Process(memory)
    job, files = await Jobs(process, Clock(), lambda: None).find(TENANT, BATCH), Files(process)
    found: list[list[dict[str, Any]]] = []
    assert job.closed
    assert job.ended
    for file_id, is_there in (
        (job.closed.output_file_id, job.ended.has_output),
        (job.closed.error_file_id, job.ended.has_errors),
    ):
        assert (await files.find(TENANT, file_id) is not None) == is_there
        data = b"".join([piece async for piece in files.pieces(TENANT, file_id)]) if is_there else b""
        found.append([json.loads(each) for each in data.splitlines()])
    return job, found[0], found[1]


async def check(memory: Memory) -> None:
    """Each line has its result, once; nothing else is left over."""
    job, output, errors = await told(memory)
    assert (job.status, job.num_done, job.num_failed) == ("completed", NUM_LINES - 1, 1)
    seen = {each["custom_id"]: each["response"]["body"]["said"] for each in (*output, *errors)}
    assert seen == {f"line {number}": number for number in range(NUM_LINES)}
    assert len(output) == NUM_LINES - 1
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [(f"line {BAD}", 400)]


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
