"""Viewers of the console, in a process of their own: each reads the streams as a browser's page does.

    echo '{"port": 8000, "num_viewers": 5, "seconds": 3}' | python -m router_rig.viewers

Prints one line of JSON. What is counted came within the window, which begins when every viewer has its snapshots.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from typing import Final

import uvloop

from diptych.common.event_loop import wait_or_timeout

PATH: Final = "/console/api/stream"
STEPS: Final = "steps"  # of which there is no snapshot


@dataclass(frozen=True, slots=True)
class Viewers:
    """How many look, and for how long."""

    port: int
    num_viewers: int
    seconds: float
    topics: str = "fleet,requests,cache,charts,steps"


@dataclass(slots=True)
class Seen:
    """What came, in the window, for all of them."""

    num_events: int = 0
    num_bytes: int = 0
    snapshot_bytes: int = 0  # of one viewer, before the window


class Viewer:
    """One of them."""

    def __init__(self, port: int, topics: str) -> None:
        self._port = port
        self._topics = topics
        self.has_all = asyncio.Event()  # snapshots
        self.num_bytes = self.num_events = 0

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        path = f"{PATH}?topics={self._topics}"
        writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise SystemExit(f"the console does not answer: {head!r}")
        num_snapshots, wanted = 0, len({*self._topics.split(",")} - {STEPS})
        while chunk := await reader.read(1 << 20):
            self.num_bytes += len(chunk)
            self.num_events += chunk.count(b"event: ")
            num_snapshots += chunk.count(b"event: snapshot")
            if num_snapshots >= wanted:
                self.has_all.set()


async def look(viewers: Viewers) -> Seen:
    """Look until the window is over."""
    all_of_them = [Viewer(viewers.port, viewers.topics) for _ in range(viewers.num_viewers)]
    tasks = [asyncio.ensure_future(each.run()) for each in all_of_them]
    for each in all_of_them:
        await each.has_all.wait()
    before = [(each.num_events, each.num_bytes) for each in all_of_them]
    print("ready", flush=True)
    await wait_or_timeout(asyncio.Event(), viewers.seconds)
    for task in tasks:
        task.cancel()
    return Seen(
        sum(each.num_events for each in all_of_them) - sum(events for events, _ in before),
        sum(each.num_bytes for each in all_of_them) - sum(num_bytes for _, num_bytes in before),
        before[0][1],
    )


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(look(Viewers(**json.load(sys.stdin)))))))
