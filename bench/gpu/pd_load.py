"""Streams completions at a given rate, whatever becomes of those before, and notes when each token came.

    echo '{"ports": [8000], "prompt_len": 2000, "num_tokens": 1000, "rate": 5, ...}' | python -m pd_load

Prints one line of JSON. Arrivals are random (Poisson, seeded: every platform gets the same ones), prompts are random
tokens that nobody has cached, several ports are asked in turn. Requests that are due after the warm-up count, whenever
they end. An event of a stream is one gap between tokens: several tokens that come together count as one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson
import uvloop

HEADERS: Final = "host: router\r\ncontent-type: application/json\r\nx-diptych-timings: 1\r\n"
EVENT: Final = b"data: {"
LAST_EVENT: Final = b"data: [DONE]"
SOURCE_LIMIT: Final = 1 << 20  # bytes of a line


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for."""

    ports: Sequence[int]
    prompt_len: int
    num_tokens: int
    rate: float  # requests/s
    seconds: float  # in which requests count that are due
    warm_up_s: float
    vocab_size: int
    model: str
    seed: int = 7
    slack_s: float = 40.0  # for what was due last to end
    prompt_seed: int = 0  # 0: as that of arrivals
    slo_ms: tuple[float, float] | None = None  # that requests tell: time to the first token, and of each one after it

    def due_s(self) -> list[float]:
        """Return when requests are due, in seconds from the first."""
        return list(itertools.takewhile(lambda due_s: due_s < self.warm_up_s + self.seconds, times(self)))


@dataclass(slots=True)
class Served:
    """One request as its client saw it. Times in seconds, from the moment when it was due."""

    num_tokens: int = 0
    stamps_s: list[float] = field(default_factory=list)  # of events with tokens
    timings: dict[str, Any] = field(default_factory=dict)  # the platform's own account
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        return self.stamps_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.stamps_s[-1] - self.stamps_s[0]) / max(1, self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.stamps_s)]


Request = asyncio.Task[Served]


async def ask(port: int, body: bytes, due_s: float) -> Served:
    served = Served()
    try:
        await _stream(port, body, due_s, served)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        served.failure = repr(error)
    return served


async def _stream(port: int, body: bytes, due_s: float, served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=SOURCE_LIMIT)
    head = f"POST /v1/completions HTTP/1.1\r\n{HEADERS}content-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
    while line := await reader.readline():
        at_s = time.perf_counter() - due_s
        if line.startswith(EVENT):
            _apply(orjson.loads(line[6:]), at_s, served)
        elif line.startswith(LAST_EVENT):
            break
        elif status != b"200":
            served.failure = f"{status.decode()}: {line.decode()[:200]}"
            break
    writer.close()


def _apply(event: dict[str, Any], at_s: float, served: Served) -> None:
    if "error" in event:
        served.failure = str(event["error"])
    served.timings = event.get("diptych") or served.timings
    tokens = sum(len(choice.get("token_ids", ())) for choice in event.get("choices", ()))
    if tokens:
        served.num_tokens += tokens
        served.stamps_s.append(at_s)


def times(workload: Workload) -> Iterator[float]:
    """Yield when requests would be due without an end, in seconds from the first."""
    rng, due_s = random.Random(workload.seed), 0.0
    while True:
        yield due_s
        due_s += rng.expovariate(workload.rate)


def bodies(workload: Workload) -> Iterator[bytes]:
    """Yield one request body after the other."""
    rng = random.Random(workload.prompt_seed or workload.seed)
    options: dict[str, Any] = {
        "max_tokens": workload.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if workload.slo_ms:
        options["slo"] = dict(zip(("ttft_ms", "tpot_ms"), workload.slo_ms, strict=True))
    while True:
        prompt = [rng.randrange(2, workload.vocab_size) for _ in range(workload.prompt_len)]
        yield orjson.dumps({"model": workload.model, "prompt": prompt, "stream": True, **options})


async def run(workload: Workload) -> list[Served]:
    """Return what became of the requests that count."""
    asked = list(zip(workload.due_s(), itertools.cycle(workload.ports), bodies(workload)))  # making takes milliseconds
    began_s = time.perf_counter()  # a loop's own clock may tick in milliseconds
    warming: list[Request] = []
    counted: list[Request] = []
    for due_s, port, body in asked:
        await asyncio.sleep(began_s + due_s - time.perf_counter())
        task = asyncio.create_task(ask(port, body, began_s + due_s))
        (warming if due_s < workload.warm_up_s else counted).append(task)
    return await _ended(warming, counted, workload.slack_s)


async def _ended(warming: Sequence[Request], counted: Sequence[Request], slack_s: float) -> list[Served]:
    """Wait for all of them, but no longer than `slack_s`; those that have not ended by then have failed."""
    _, late = await asyncio.wait([*warming, *counted], timeout=slack_s)
    for task in late:
        task.cancel()
    failed = Served(failure=f"not over {slack_s:g} s after the last request was due")
    return [failed if task in late else task.result() for task in counted]


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps([asdict(each) for each in runner.run(run(Workload(**json.load(sys.stdin))))]))
