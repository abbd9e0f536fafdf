"""Somebody without the token, or with a wrong one, knocks at every port; then without its key at every transfer engine.

Each attempt is refused and counted, or does not even arrive, and nobody notices a thing.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import grpc
import httpx

from diptych.common.net.rpc import open_channel
from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import INSECURE, Trust
from diptych.v1 import admin_pb2, admin_pb2_grpc, bootstrap_pb2, bootstrap_pb2_grpc, worker_pb2, worker_pb2_grpc
from drill.cluster import HUNG_S, Cluster, Worker, until
from drill.drill import Drill, Scenario

STRANGER: Final = Path(__file__).parents[1] / "stranger.py"
COUNTED: Final = re.compile(r"^diptych_auth_refusals_total\{.*\} (\S+)$", re.MULTILINE)

Call = Callable[[grpc.aio.Channel], Awaitable[object]]


async def run(drill: Drill) -> None:
    cluster = drill.cluster
    strangers = {"no token": INSECURE, "a wrong token": Trust(Tokens.of_variable(secrets.token_hex(32)), None)}
    num_refused = 0
    for name, trust in strangers.items():
        calls = [(replica.address, call) for replica in cluster.bootstraps for call in (_register, _watch)]
        calls += [(worker.address, call) for worker in cluster.workers for call in (_session, _status, _drain)]
        for address, call in calls:
            code = await _try(address, trust, call)
            is_refused = code is grpc.StatusCode.UNAUTHENTICATED
            num_refused += is_refused
            drill.complain_unless(is_refused, f"{call.__name__} at {address} with {name}: {code}")
    drill.counts["calls refused"] = num_refused
    for worker in cluster.workers:
        await _check_count(drill, worker, at_least=6)
    await _knock_at_transfers(drill)
    await drill.traffic.next_tokens()


async def _try(address: str, trust: Trust, call: Call) -> grpc.StatusCode:
    async with open_channel(address, trust) as channel:
        while True:
            try:
                await call(channel)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INTERNAL:  # gRPC's client, when it is refused while it writes
                    continue
                return error.code()
            return grpc.StatusCode.OK


async def _register(channel: grpc.aio.Channel) -> None:
    async def heartbeats() -> AsyncIterator[bootstrap_pb2.Heartbeat]:
        instance = bootstrap_pb2.Instance(instance_id=7, role=bootstrap_pb2.ROLE_DECODE, address="10.77.0.254:1")
        yield bootstrap_pb2.Heartbeat(sequence=1, instance=instance)

    await anext(aiter(bootstrap_pb2_grpc.BootstrapStub(channel).Register(heartbeats(), timeout=HUNG_S)))


async def _watch(channel: grpc.aio.Channel) -> None:
    watch = bootstrap_pb2_grpc.BootstrapStub(channel).Watch(bootstrap_pb2.WatchRequest(), timeout=HUNG_S)
    await anext(aiter(watch))


async def _session(channel: grpc.aio.Channel) -> None:
    async def batches() -> AsyncIterator[worker_pb2.RouterBatch]:
        yield worker_pb2.RouterBatch(abort=[1])

    await anext(aiter(worker_pb2_grpc.WorkerStub(channel).Session(batches(), timeout=HUNG_S)))


async def _status(channel: grpc.aio.Channel) -> None:
    await worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.StatusRequest(), timeout=HUNG_S)


async def _drain(channel: grpc.aio.Channel) -> None:
    await admin_pb2_grpc.WorkerAdminStub(channel).Drain(admin_pb2.DrainRequest(), timeout=HUNG_S)


async def _check_count(drill: Drill, worker: Worker, at_least: int) -> None:
    text = await _metrics(worker)
    count = sum(float(each) for each in COUNTED.findall(text))
    drill.complain_unless(count >= at_least, f"{worker} counted {count:g} refusals, not {at_least}")


async def _metrics(worker: Worker) -> str:
    address = (await worker.status()).instance.metrics_address
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://{address}/metrics", timeout=HUNG_S)).text


async def _knock_at_transfers(drill: Drill) -> None:
    """With all that membership tells but the key, from a host of its own, no link comes up."""
    victims = [each for each in await drill.cluster.members() if each.transfer.engine_metadata]
    known = json.dumps([(each.instance_id, each.transfer.engine_metadata.hex()) for each in victims])
    enter = drill.cluster.new_host().enter
    command = (*enter, sys.executable, str(STRANGER))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    said, _ = await process.communicate(known.encode())
    drill.complain_unless(
        json.loads(said or b"null") == [], f"a stranger was linked to {said.decode() or 'nobody knows'}"
    )
    if enter:
        counts = await _counts(drill.cluster)
        drill.complain_unless(not any(counts), f"messages of a host that is no peer's came through: {counts}")
    else:  # it is on a host of peers, whose packets the kernel lets through
        await until(lambda: _uncounted(drill.cluster), HUNG_S)


async def _uncounted(cluster: Cluster) -> str:
    counts = await _counts(cluster)
    return "" if min(counts) else f"messages without the key that workers counted: {counts}"


async def _counts(cluster: Cluster) -> list[int]:
    return [(await worker.status()).unauthenticated_messages for worker in cluster.workers]


SCENARIO = Scenario("intruder", run)
