"""A batch in a store that survives, and processes that die."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from diptych.router.batches.bench import Bench, LineCall
from diptych.router.batches.files import FileFacts, Files
from diptych.router.batches.idle import Busy
from diptych.router.batches.job import Claimed, Job, Spec
from diptych.router.batches.jobs import Jobs
from diptych.router.batches.log import JobLog
from diptych.router.batches.results import Reply
from diptych.router.batches.slots import Slots
from diptych.router.batches.store import StoreCalls
from diptych.router.batches.work import JobWork

T = TypeVar("T")

URL = "/v1/completions"
LEASE_S = 30.0
TIMEOUT_S = 200.0  # only for what hangs: machines may be busy
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

    do_long = do


async def serve(call: LineCall) -> Reply:
    """Recite the prompt; the `BAD` one is refused."""
    await asyncio.sleep(0)
    call.slot.answered()
    number = json.loads(call.body)["prompt"]
    return Reply(400 if number == BAD else 200, orjson.dumps({"said": number}))


def bench(
    process: Process,
    clock: Clock,
    serve: Callable[[LineCall], Any] = serve,
    monotonic: Callable[[], float] | None = None,
) -> Bench:
    """Unless told otherwise no time passes but that of `clock`: how often a process writes hangs on nothing else."""
    slots = Slots(2, lambda fleet, num_prompts: Busy(0, 0, 8, 0, num_prompts, 0, 8, 1.0, False), lambda model: 0)
    files, monotonic = Files(process), monotonic or clock
    return Bench(process, files, slots, serve, clock, LEASE_S, 1000, 0.0, rng=AtOnce(), monotonic=monotonic)


def line(number: int) -> dict[str, Any]:
    return {"custom_id": f"line {number}", "method": "POST", "url": URL, "body": {"prompt": number}}


async def begun(memory: Memory, lines: int = NUM_LINES, spec: Spec = SPEC) -> None:
    """Upload an input, and make a batch of it."""
    process = Process(memory)
    text = b"\n\n".join(json.dumps(line(number)).encode() for number in range(lines))
    async with Files(process).upload(spec.tenant, spec.input_file_id) as upload:
        await upload.write(text)
        await upload.keep(FileFacts(INPUT, len(text), 0.0, "in.jsonl", "batch"))
    await Jobs(process, Clock(), lambda: None).create(spec)


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
