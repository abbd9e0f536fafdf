"""Many instances or watchers in a process of their own, for `bench/bootstrap.py`: real streams, realistic records.

    python bench/bootstrap_load.py instances PORT COUNT
    python bench/bootstrap_load.py watchers PORT COUNT SECONDS

Instances use the registration of workers, each over a connection of its own (to a loopback address of its own), and
have another load in every heartbeat. Watchers read bytes: parsing is their own business. One more instance here changes
what it says five times a second; the watchers note when they hear of it, and print the latencies in ms.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from diptych.common.members.membership_client import Registration
from diptych.common.net.rpc import open_channel
from diptych.common.trust.trust import TrustConfig
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, ROLE_DECODE, ROLE_PREFILL, Instance, WatchRequest

NUM_LINKS = 16
METADATA_BYTES = 1000
CHANGE_EVERY_S = 0.2
TRUST = TrustConfig().trust()  # the token that the benchmark made
WATCH = "/diptych.v1.Bootstrap/Watch"


def record(number: int) -> Instance:
    """A worker with as much to say as one with 16 peers has."""
    rng = random.Random(number)
    instance = Instance(
        instance_id=rng.getrandbits(64) or 1,
        role=ROLE_PREFILL if number % 2 else ROLE_DECODE,
        address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:7100",
        metrics_address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:9100",
        model_id="meta-llama/Llama-3.1-8B-Instruct",
        started_as="meta-llama/Llama-3.1-8B-Instruct",
        compat="0123456789abcdef",
        state=INSTANCE_STATE_READY,
        version="0.1.0",
        context_len=131_072,
    )
    instance.transfer.engine_metadata = rng.randbytes(METADATA_BYTES)
    instance.terms.weights, instance.terms.kv_shape = "5" * 32, "32 layers, 8 KV heads of 128"
    peers = [rng.getrandbits(64) for _ in range(NUM_LINKS)]
    instance.load.linked_instances.extend(peers)
    for peer in peers:
        instance.load.link_speeds.add(peer_instance_id=peer, bytes_per_s=rng.random() * 4e10)
    return instance


class Busy:
    """An instance whose load is another one each time it is asked."""

    def __init__(self, number: int) -> None:
        self._record = record(number)

    def __call__(self) -> Instance:
        load = self._record.load
        load.num_running = (load.num_running + 1) % 256
        load.free_pages = random.randrange(100_000)
        return self._record


async def instances(port: int, count: int) -> None:
    """Register until killed. Streams begin spread over a second, as heartbeats of real workers are."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            address = f"127.1.{number >> 8}.{number & 255}:{port}"
            tasks.create_task(Registration([address], TRUST, Busy(number)).run())
            await asyncio.sleep(1 / count)


async def watchers(port: int, count: int, duration_s: float) -> None:
    """Print how long each change took to each watcher, in ms."""
    canary = record(1_000_000)
    told_s: dict[bytes, float] = {}
    latencies_ms: list[float] = []
    registration = Registration([f"127.0.0.1:{port}"], TRUST, lambda: canary)
    async with asyncio.TaskGroup() as tasks:
        streams = [open_channel(f"127.2.0.{number}:{port}", TRUST) for number in range(1, count + 1)]
        running = [tasks.create_task(registration.run())]
        running += [tasks.create_task(_watch(stream, told_s, latencies_ms)) for stream in streams]
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            await asyncio.sleep(CHANGE_EVERY_S)
            canary.not_ready = f"change {len(told_s):08}"
            told_s[canary.not_ready.encode()] = time.monotonic()
            registration.nudge()
        await asyncio.sleep(1)
        for task in running:
            task.cancel()
    print(json.dumps({"changes": len(told_s), "latencies_ms": latencies_ms}))


async def _watch(channel: Any, told_s: dict[bytes, float], latencies_ms: list[float]) -> None:
    updates: AsyncIterator[bytes] = channel.unary_stream(WATCH)(WatchRequest().SerializeToString())
    async for update in updates:
        at = update.find(b"change ")
        if at >= 0 and (began_s := told_s.get(update[at : at + 15])) is not None:
            latencies_ms.append((time.monotonic() - began_s) * 1e3)


if __name__ == "__main__":
    kind, arguments = sys.argv[1], [int(value) for value in sys.argv[2:]]
    asyncio.run(instances(*arguments) if kind == "instances" else watchers(*arguments))
