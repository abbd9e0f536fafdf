"""The same requests without a router: both legs over a session to each worker of a pair, as a router would open them.

    echo '{"prefill": "127.0.0.1:7001", "decode": ..., "concurrency": 1, ...}' | python -m router_rig.direct

What it takes is what the workers, gRPC and two processes on this machine take; a router can only add to it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import uvloop

from diptych.common.members.roles import LegKind
from diptych.common.net.rpc import open_channel
from diptych.common.trust.trust import INSECURE
from diptych.router.workers.outbox import Outbox, open_session
from diptych.v1.inference_pb2 import SamplingParams
from diptych.v1.worker_pb2 import StartLeg
from router_rig.load import Tally

KINDS: Final = (LegKind.PREFILL, LegKind.DECODE)


@dataclass(frozen=True, slots=True)
class DirectLoad:
    """What to ask, and of whom."""

    prefill: str
    decode: str
    concurrency: int
    seconds: float
    prompt_len: int
    num_tokens: int


class Caller:
    """Keeps `concurrency` requests going over one session to each of the two."""

    def __init__(self, load: DirectLoad) -> None:
        self._load = load
        self._outboxes = {kind: Outbox() for kind in KINDS}
        self._prompt = list(range(1000, 1000 + load.prompt_len))
        self._open: dict[int, int] = {}  # room: legs that have not ended
        self._began_s: dict[int, float] = {}
        self._next_room = 1
        self.tally = Tally()

    async def run(self) -> Tally:
        load = self._load
        async with open_channel(load.prefill, INSECURE) as prefill, open_channel(load.decode, INSECURE) as decode:
            channels = dict(zip(KINDS, (prefill, decode), strict=True))
            readers = [asyncio.ensure_future(self._read(kind, channel)) for kind, channel in channels.items()]
            for _ in range(load.concurrency):
                self._ask()
            began_s = time.perf_counter()
            await asyncio.sleep(load.seconds)
            self.tally.seconds = time.perf_counter() - began_s
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        return self.tally

    async def _read(self, kind: LegKind, channel: Any) -> None:
        async for batch in open_session(channel, self._outboxes[kind]):
            for output in batch.outputs:
                if output.finish_reason:
                    self._end(output.room)

    def _ask(self) -> None:
        room, self._next_room = self._next_room, self._next_room + 1
        self._open[room], self._began_s[room] = len(KINDS), time.perf_counter()
        sampling = SamplingParams(max_tokens=self._load.num_tokens)
        for kind in KINDS:
            leg = StartLeg(room=room, prompt_token_ids=self._prompt, sampling=sampling, kind=kind.wire)
            self._outboxes[kind].start(leg)

    def _end(self, room: int) -> None:
        self._open[room] -= 1
        if self._open[room]:
            return
        del self._open[room]
        self.tally.requests += 1
        self.tally.latencies_s.append(time.perf_counter() - self._began_s.pop(room))
        self._ask()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(asdict(runner.run(Caller(DirectLoad(**json.load(sys.stdin))).run()))))
