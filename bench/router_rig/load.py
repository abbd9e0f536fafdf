"""A closed loop of HTTP requests over kept-open connections, in a process of its own, as cheap as Python allows.

    echo '{"port": 8000, "bodies": ["..."], "concurrency": 32, "seconds": 3, "pids": [1]}' | python -m router_rig.load

Prints one line of JSON. `NUMBER` in a body becomes another number of as many digits in each request. CPU time of the
processes `pids` is read at both ends of the window, in which a request counts when it ends there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, cast

import psutil
import uvloop

from diptych.common.event_loop import wait_or_timeout

NUMBER: Final = "1000000000"  # in a body: stands for one that no other request has
LAST_OF_STREAM: Final = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask, and how often."""

    port: int
    bodies: Sequence[str]  # in turn
    concurrency: int
    seconds: float
    pids: Sequence[int] = ()
    path: str = "/v1/chat/completions"
    warm_up_s: float = 1.0
    spread_s: float = 0.0  # over which the first requests begin
    max_requests: int = 1 << 60  # within the window
    first_number: int = int(NUMBER)


@dataclass(slots=True)
class Tally:
    """What was measured in the window. Times in seconds."""

    seconds: float = 0.0
    requests: int = 0
    failures: int = 0
    first_failure: str = ""
    cpu_s: float = 0.0  # of `pids`
    latencies_s: list[float] = field(default_factory=list)
    first_byte_s: list[float] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """Asks, reads the answer up to its end, asks again."""

    def __init__(self, next_request: Callable[[], bytes], on_answer: Callable[[_Connection, bool], None]) -> None:
        self._next_request = next_request
        self._on_answer = on_answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self.began_s, self.first_byte_s, self.tail = time.perf_counter(), 0.0, b""
        self._length_left: int | None = None
        self._transport.write(self._next_request())

    def data_received(self, data: bytes) -> None:
        if not self.first_byte_s:
            self.first_byte_s = time.perf_counter()
            self._begin(data)
        elif self._length_left is not None:
            self._length_left -= len(data)
        self.tail = (self.tail + data)[-512:]
        if self._length_left is None and self.tail.endswith(b"\r\n0\r\n\r\n"):
            self._end(self.is_good and self.tail.endswith(LAST_OF_STREAM))
        elif self._length_left is not None and self._length_left <= 0:
            self._end(self.is_good)

    def _begin(self, data: bytes) -> None:
        self.is_good = data.startswith(b"HTTP/1.1 200 ")
        head, _, body = data.partition(b"\r\n\r\n")
        at = head.find(b"content-length: ")
        if at >= 0:
            self._length_left = int(head[at + 16 :].split(b"\r\n", 1)[0]) - len(body)

    def _end(self, is_good: bool) -> None:
        self._on_answer(self, is_good)
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._transport.is_closing():
            self._on_answer(self, False)

    def close(self) -> None:
        self._transport.close()


class Generator:
    """Runs a load and tallies what happens in its window."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._requests = itertools.cycle([_request(load.path, body.encode()) for body in load.bodies])
        self._number = load.first_number
        self._is_open = False
        self._full = asyncio.Event()
        self.tally = Tally()

    async def run(self) -> Tally:
        loop, load = asyncio.get_running_loop(), self._load
        connections = []
        for _ in range(load.concurrency):
            _, connection = await loop.create_connection(
                lambda: _Connection(self._next_request, self._note), "127.0.0.1", load.port
            )
            connections.append(connection)
            await asyncio.sleep(load.spread_s / load.concurrency)
        await asyncio.sleep(load.warm_up_s)
        await self._measure()
        for connection in connections:
            connection.close()
        return self.tally

    async def _measure(self) -> None:
        began_s, began_cpu_s, self._is_open = time.perf_counter(), cpu_s(self._load.pids), True
        await wait_or_timeout(self._full, self._load.seconds)
        self._is_open = False
        self.tally.cpu_s = cpu_s(self._load.pids) - began_cpu_s
        self.tally.seconds = time.perf_counter() - began_s

    def _next_request(self) -> bytes:
        self._number += 1
        return next(self._requests).replace(NUMBER.encode(), b"%d" % self._number)

    def _note(self, connection: _Connection, is_good: bool) -> None:
        if not self._is_open:
            return
        if not is_good:
            self.tally.failures += 1
            self.tally.first_failure = self.tally.first_failure or connection.tail.decode(errors="replace")
            return
        now_s, tally = time.perf_counter(), self.tally
        tally.requests += 1
        tally.latencies_s.append(now_s - connection.began_s)
        tally.first_byte_s.append(connection.first_byte_s - connection.began_s)
        if tally.requests >= self._load.max_requests:
            self._full.set()


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time that processes have used so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(Generator(Load(**json.load(sys.stdin))).run()))))
