"""Requests at a steady rate over connections that stay, until told to stop: what does not differ from turn to turn.

    python -m router_rig.steady '{"port": 8000, "body": "...", "rate": 500, "num_connections": 128}' < PIPE

Ends when its input does, and prints one line of JSON. The kernel spreads connections over the processes of a router,
and they are used in turn: so each process has the same share of the requests all the time. Arrivals are at random
moments of a second (seeded), and each second is like the one before: turns do not differ by what is asked. `NUMBER` in
the body becomes another number in each request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field

import uvloop

from router_rig.load import NUMBER


@dataclass(frozen=True, slots=True)
class Steady:
    """What to ask, and how often."""

    port: int
    body: str
    rate: float  # requests/s, a whole number
    num_connections: int = 128
    path: str = "/v1/chat/completions"


@dataclass(slots=True)
class Answers:
    """What was served. Times in seconds, on the monotonic clock."""

    due_s: list[float] = field(default_factory=list)  # when each request should have been sent
    ttft_s: list[float] = field(default_factory=list)  # from then on
    failures: list[str] = field(default_factory=list)


class _Client:
    """Sends requests over connections that are used in turn."""

    def __init__(self, steady: Steady) -> None:
        self._steady = steady
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        self._number = int(NUMBER)
        self.answers = Answers()

    async def connect(self) -> None:
        for _ in range(self._steady.num_connections):
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._steady.port))

    async def ask(self, due_s: float) -> None:
        try:
            ttft_s = await self._exchange(due_s)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self.answers.failures.append(repr(error))
        else:
            self.answers.due_s.append(due_s)
            self.answers.ttft_s.append(ttft_s)

    async def _exchange(self, due_s: float) -> float:
        if not self._idle:
            raise ValueError("no connection is free")
        reader, writer = self._idle.popleft()
        writer.write(self._request())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise ValueError(head.decode())
        await reader.readline()  # the first chunk begins: the first token is here
        ttft_s = time.monotonic() - due_s
        await reader.readuntil(b"\r\n0\r\n\r\n")
        self._idle.append((reader, writer))
        return ttft_s

    def _request(self) -> bytes:
        self._number += 1
        body = self._steady.body.replace(NUMBER, str(self._number)).encode()
        return (
            f"POST {self._steady.path} HTTP/1.1\r\nhost: router\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )


async def _run(steady: Steady) -> Answers:
    loop, rng, client = asyncio.get_running_loop(), random.Random(7), _Client(steady)
    is_over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), is_over.set)
    await client.connect()
    print("ready", flush=True)
    begin_s, moments_s = time.monotonic(), sorted(rng.random() for _ in range(max(1, round(steady.rate))))
    arrivals = (begin_s + second + moment_s for second in itertools.count() for moment_s in moments_s)
    async with asyncio.TaskGroup() as group:
        while not is_over.is_set():
            due_s = next(arrivals)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            group.create_task(client.ask(due_s))
    return client.answers


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(_run(Steady(**json.loads(sys.argv[1])))))))
