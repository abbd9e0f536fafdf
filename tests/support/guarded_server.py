"""A server with the real services of bootstrap and worker, and callers who do or don't belong here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from diptych.bootstrap.server import BootstrapService
from diptych.common.net.rpc import listen, new_server, open_channel
from diptych.common.refusals import Refusals
from diptych.common.trust.tokens import Tokens, digest_line
from diptych.common.trust.trust import Trust
from diptych.common.verdicts.permissions import Party
from diptych.engine.frontend.admin import RoleChanges, WorkerAdminService, WorkerDrain
from diptych.engine.frontend.service import WorkerService
from diptych.v1 import admin_pb2, admin_pb2_grpc, bootstrap_pb2, bootstrap_pb2_grpc, worker_pb2, worker_pb2_grpc

TIMEOUT_S = 200.0  # only for what hangs: machines may be busy
OURS = Trust(Tokens.of_variable("the-token-of-this-platform"), None)
THEIRS = Trust(Tokens.of_variable("the-token-of-another-one"), None)
SECRETS = {party: f"the-secret-word-of-a-{party.value}" for party in Party}
KNOWS_ALL = Trust(Tokens.of_variable("\n".join(digest_line(*each) for each in SECRETS.items())), None)  # and has none
INSTANCE = bootstrap_pb2.Instance(
    instance_id=1, address="a:1", role=bootstrap_pb2.ROLE_PREFILL, state=bootstrap_pb2.INSTANCE_STATE_READY
)

Call = Callable[[grpc.aio.Channel], Awaitable[Any]]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def one_of(party: Party) -> Trust:
    """What a member has that is one party only."""
    return Trust(Tokens.of_variable(f"{party.value}:{SECRETS[party]}"), None)


@contextlib.asynccontextmanager
async def serving(
    trust: Trust, refusals: Refusals | None = None, port: int = 0, *, own_host: str = "", also_at: str = ""
) -> AsyncIterator[str]:
    """Everything that a component serves to others, without a model behind it; yields the address."""
    server = new_server(trust, refusals or Refusals(), own_host=own_host)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
    worker, bootstrap = WorkerService([]), BootstrapService(trust, lease_s=60, heartbeat_s=0.1)
    bootstrap.add_to(server)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    admin_pb2_grpc.add_WorkerAdminServicer_to_server(
        WorkerAdminService(worker, WorkerDrain(worker.groups, drain_s=1.0), RoleChanges(1.0, lambda role: None)), server
    )
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = listen(server, "127.0.0.1", port, trust)
    if also_at:
        server.add_insecure_port(also_at)
    await server.start()
    running = asyncio.ensure_future(bootstrap.run())
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)
        await cancel([running])


async def first(call: Any) -> Any:
    """The first message of a stream."""
    async for message in call:
        return message


async def silent() -> AsyncIterator[Any]:
    """What a caller says that opens a stream and sends nothing."""
    await asyncio.Event().wait()
    yield


METHODS = {
    f"/{service.full_name}/{method.name}"
    for package in (bootstrap_pb2, worker_pb2, admin_pb2)
    for service in package.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def watch(channel: grpc.aio.Channel) -> Awaitable[Any]:
    return first(bootstrap_pb2_grpc.BootstrapStub(channel).Watch(bootstrap_pb2.WatchRequest()))


def call_of(method: str, *said: bytes) -> Call:
    """Whatever kind of call it is: open a stream, and say this and then nothing, or nothing at all."""
    return lambda channel: first(channel.stream_stream(method, bytes, bytes)(iter(said) if said else silent()))


async def code_of(call: Call, address: str, trust: Trust) -> tuple[grpc.StatusCode, str]:
    """How a call ends; OK when it is answered. One that gRPC itself lost on a busy machine is made again."""
    while True:
        async with open_channel(address, trust) as channel:
            try:
                await call(channel)
            except grpc.aio.AioRpcError as error:
                if error.details() != "Internal error from Core":
                    return error.code(), error.details() or ""
            else:
                return grpc.StatusCode.OK, ""


def count(refusals: Refusals, reason: str) -> float:
    registry = CollectorRegistry()
    registry.register(refusals)
    return registry.get_sample_value("diptych_auth_refusals_total", {"reason": reason}) or 0.0


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
