"""Requests at a given rate, whatever becomes of those before: what many clients do, who do not know of each other.

    echo '{"port": 8000, "body": "...", "rate": 50, "seconds": 5, "headers": {}}' | python -m router_rig.open_loop

Prints one line of JSON. Arrivals are random (Poisson, seeded); those of the window count, whenever they end. `NUMBER`
in the body becomes another number in each request.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import uvloop

from router_rig.load import NUMBER


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What to ask, and how often."""

    port: int
    body: str
    rate: float  # requests/s
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = "/v1/chat/completions"
    warm_up_s: float = 2.0
    first_number: int = int(NUMBER)


@dataclass(slots=True)
class Fates:
    """What became of the requests of the window. Times in seconds, from the moment when each was due."""

    ttft_s: list[float] = field(default_factory=list)  # of those that were served
    refused_s: list[float] = field(default_factory=list)  # 429
    num_without_retry_after: int = 0  # of the refused
    failures: list[str] = field(default_factory=list)

    @property
    def num_offered(self) -> int:
        return len(self.ttft_s) + len(self.refused_s) + len(self.failures)

    def num_within(self, slo_s: float) -> int:
        return sum(ttft_s <= slo_s for ttft_s in self.ttft_s)


class _Client:
    """Sends requests over connections that it keeps."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, number: int, due_s: float, fates: Fates) -> None:
        try:
            await self._exchange(number, due_s, fates)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            fates.failures.append(repr(error))

    async def _exchange(self, number: int, due_s: float, fates: Fates) -> None:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self._request(number))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status, headers = int(head.split(" ", 2)[1]), dict(_fields(head))
        if status == 200:
            await reader.readline()  # the first chunk begins: the first token is here
            fates.ttft_s.append(asyncio.get_running_loop().time() - due_s)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            body = await reader.readexactly(int(headers["content-length"]))
            if status == 429:
                fates.refused_s.append(asyncio.get_running_loop().time() - due_s)
                fates.num_without_retry_after += "retry-after" not in headers
            else:
                fates.failures.append(f"{status}: {body[:200]!r}")
        self._idle.append((reader, writer))

    @property
    def _port(self) -> int:
        return self._arrivals.port

    def _request(self, number: int) -> bytes:
        body = self._arrivals.body.replace(NUMBER, str(number)).encode()
        headers = {"host": "router", "content-length": str(len(body)), **self._arrivals.headers}
        lines = [f"POST {self._arrivals.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body


def _fields(head: str) -> Sequence[tuple[str, str]]:
    pairs = [line.partition(":") for line in head.split("\r\n")[1:] if line]
    return [(name, value.strip()) for name, _, value in pairs]


async def _run(arrivals: Arrivals) -> Fates:
    loop, rng, client = asyncio.get_running_loop(), random.Random(7), _Client(arrivals)
    begin_s = loop.time()
    due_s, window_s = begin_s, begin_s + arrivals.warm_up_s
    fates, ignored, number = Fates(), Fates(), arrivals.first_number
    async with asyncio.TaskGroup() as group:
        while due_s < window_s + arrivals.seconds:
            await asyncio.sleep(due_s - loop.time())
            group.create_task(client.ask(number, due_s, fates if due_s >= window_s else ignored))
            due_s += rng.expovariate(arrivals.rate)
            number += 1
    return fates


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(_run(Arrivals(**json.load(sys.stdin)))))))
