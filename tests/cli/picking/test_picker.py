"""The picker as gateways and kubelets see it: over a real stream of gRPC, beside a bootstrap that lists routers."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.cli.main import main
from diptych.cli.picking.certificate import self_made
from diptych.cli.picking.picker import SERVICE, Picker, PickerConfig, build, endpoints, run
from diptych.common.errors import ConfigError
from diptych.common.event_loop import Stop
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance, WatchUpdate
from diptych.v1.bootstrap_pb2_grpc import BootstrapServicer, add_BootstrapServicer_to_server
from diptych.v1.ext_proc_pb2 import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    Metadata,
    ProcessingRequest,
    ProcessingResponse,
)

READY, DRAINING = bootstrap_pb2.INSTANCE_STATE_READY, bootstrap_pb2.INSTANCE_STATE_DRAINING
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs
KEY = "x-gateway-destination-endpoint"
HUNG_S = 100.0  # that nothing takes on however busy a machine


def member(
    number: int, address: str, *, role: Any = bootstrap_pb2.ROLE_ROUTER, state: Any = READY, not_ready: str = ""
) -> Instance:
    return Instance(instance_id=number, role=role, address=address, state=state, not_ready=not_ready)


class Lists(BootstrapServicer):
    """A bootstrap that lists whom it is told to."""

    def __init__(self) -> None:
        self.updates: asyncio.Queue[WatchUpdate] = asyncio.Queue()
        self._revision = 0

    def tell(self, *instances: Instance) -> None:
        self._revision += 1
        is_first = self._revision == 1
        self.updates.put_nowait(
            WatchUpdate(revision=self._revision, snapshot=is_first, upserts=instances, lease_ms=3000)
        )

    async def Watch(self, request: object, context: object) -> AsyncIterator[WatchUpdate]:
        while True:
            yield await self.updates.get()


@asynccontextmanager
async def leaving(stop: Stop, *, linger_s: float, drain_s: float) -> AsyncIterator[tuple[Lists, grpc.aio.Channel]]:
    """A picker in plain text, which has ended behind this: it is hurried then."""
    bootstrap, lists = grpc.aio.server(), Lists()
    add_BootstrapServicer_to_server(lists, bootstrap)
    port = bootstrap.add_insecure_port("127.0.0.1:0")
    await bootstrap.start()
    serving = build(PickerConfig(bootstrap=(f"127.0.0.1:{port}",), port=0, plain_text=True))
    task = asyncio.create_task(run(serving, stop, linger_s=linger_s, drain_s=drain_s))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}") as channel:
            yield lists, channel
    finally:
        stop.set()
        stop.hurry.set()
        await task
        await bootstrap.stop(None)


@asynccontextmanager
async def picking() -> AsyncIterator[tuple[Lists, grpc.aio.Channel]]:
    async with leaving(Stop(), linger_s=0.0, drain_s=0.0) as parts:
        yield parts


def played(scene: Callable[[Lists, grpc.aio.Channel], Awaitable[None]]) -> None:
    async def play() -> None:
        async with asyncio.timeout(HUNG_S), picking() as (lists, channel):
            await scene(lists, channel)

    asyncio.run(play())


def called(channel: grpc.aio.Channel) -> Any:
    method: Any = channel.stream_stream(
        f"/{SERVICE}/Process",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
    return method()


async def asked(channel: grpc.aio.Channel, subset: list[str] | None = None, **headers: str) -> ProcessingResponse:
    pairs = [HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    request = ProcessingRequest(request_headers=HttpHeaders(headers=HeaderMap(headers=pairs)))
    if subset is not None:
        space = Struct()
        space.update({f"{KEY}-subset": subset})
        request.metadata_context.CopyFrom(Metadata(filter_metadata={"envoy.lb.subset_hint": space}))
    call = called(channel)
    await call.write(request)
    answer: ProcessingResponse = await call.read()
    await call.done_writing()
    assert await call.read() is EOF
    return answer


async def serving(channel: grpc.aio.Channel, service: str, status: Any) -> None:
    """Wait until it has this status."""
    request = health_pb2.HealthCheckRequest(service=service)
    async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
        if answer.status == status:
            return


def picked(answer: ProcessingResponse) -> str:
    metadata: Any = answer.dynamic_metadata
    return str(metadata["envoy.lb"][KEY])


async def until(channel: grpc.aio.Channel, is_so: Callable[[str], bool]) -> None:
    """Ask until what is picked is so: the news are on their way."""
    endpoints = ""
    while not is_so(endpoints):
        endpoints = picked(await asked(channel))


def test_a_gateway_is_told_of_routers_as_they_come_and_drain() -> None:
    async def scene(lists: Lists, channel: grpc.aio.Channel) -> None:
        await serving(channel, "liveness", health_pb2.HealthCheckResponse.SERVING)
        await serving(channel, "readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await asked(channel)).immediate_response.status.code == 503
        lists.tell(member(1, "10.0.0.1:41234"), member(2, "10.0.0.7:7001", role=bootstrap_pb2.ROLE_DECODE))
        await serving(channel, SERVICE, health_pb2.HealthCheckResponse.SERVING)
        assert picked(await asked(channel)) == "10.0.0.1:8000"
        lists.tell(member(3, "10.0.0.3:41234"))
        await until(channel, lambda endpoints: "10.0.0.3:8000" in endpoints)
        assert picked(await asked(channel, ["10.0.0.3:8000"])) == "10.0.0.3:8000"
        assert (await asked(channel, [])).immediate_response.status.code == 503
        lists.tell(member(1, "10.0.0.1:41234", state=DRAINING))
        await until(channel, lambda endpoints: endpoints == "10.0.0.3:8000")

    played(scene)


def test_an_open_request_counts_until_its_stream_ends_and_its_body_comes_back() -> None:
    async def scene(lists: Lists, channel: grpc.aio.Channel) -> None:
        lists.tell(member(1, "10.0.0.1:1"), member(2, "10.0.0.2:1"))
        await serving(channel, "readiness", health_pb2.HealthCheckResponse.SERVING)
        calls, firsts = [], []
        for _ in range(6):
            call = called(channel)
            await call.write(ProcessingRequest(request_headers=HttpHeaders()))
            firsts.append(picked(await call.read()).split(",")[0])
            calls.append(call)
        assert sorted(firsts) == ["10.0.0.1:8000"] * 3 + ["10.0.0.2:8000"] * 3
        await calls[0].write(ProcessingRequest(request_body=HttpBody(body=b"{}", end_of_stream=True)))
        piece = (await calls[0].read()).request_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (b"{}", True)
        for call, first in zip(calls, firsts, strict=True):
            if first == "10.0.0.1:8000":
                call.cancel()
        await until(channel, lambda endpoints: endpoints.startswith("10.0.0.1"))

    played(scene)


async def open_stream(channel: grpc.aio.Channel) -> Any:
    """Return the call of a request that has been sent to a router."""
    call = called(channel)
    await call.write(ProcessingRequest(request_headers=HttpHeaders()))
    assert picked(await call.read())
    return call


async def passes(call: Any, body: bytes, *, is_last: bool = False) -> bool:
    """Say whether a piece of an answer comes back."""
    await call.write(ProcessingRequest(response_body=HttpBody(body=body, end_of_stream=is_last)))
    piece = (await call.read()).response_body.response.body_mutation.streamed_response
    return (piece.body, piece.end_of_stream) == (body, is_last)


def test_one_that_leaves_is_not_ready_and_answers_who_still_comes() -> None:
    async def scene() -> None:
        stop = Stop()
        async with asyncio.timeout(HUNG_S), leaving(stop, linger_s=1000.0, drain_s=1000.0) as (lists, channel):
            lists.tell(member(1, "10.0.0.1:1"))
            await serving(channel, "readiness", health_pb2.HealthCheckResponse.SERVING)
            stop.set()
            await serving(channel, "readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
            await serving(channel, "liveness", health_pb2.HealthCheckResponse.SERVING)
            assert picked(await asked(channel)) == "10.0.0.1:8000"
            lists.tell(member(1, "10.0.0.1:1", state=DRAINING), member(2, "10.0.0.2:1"))
            await until(channel, lambda endpoints: endpoints == "10.0.0.2:8000")

    asyncio.run(scene())


def test_whoever_hurries_it_stops_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stops at the same time, one with a grace that is over, are a segmentation fault in gRPC."""

    async def scene() -> list[float | None]:
        serving, stop, graces = build(PickerConfig(bootstrap=("127.0.0.1:1",), port=0, plain_text=True)), Stop(), []
        end = serving.server.stop

        async def noted(server: grpc.aio.Server, grace: float | None) -> None:
            graces.append(grace)
            await end(grace)

        monkeypatch.setattr(type(serving.server), "stop", noted)
        stop.set()
        stop.hurry.set()
        await run(serving, stop, linger_s=0.0, drain_s=9.0)
        return graces

    assert asyncio.run(scene()) == [None]


def test_a_grace_that_is_cut_short_has_ended_before_the_server_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> list[tuple[float | None, int]]:
        serving, stop, graces = build(PickerConfig(bootstrap=("127.0.0.1:1",), port=0, plain_text=True)), Stop(), []
        end, running = serving.server.stop, set[float | None]()

        async def noted(server: grpc.aio.Server, grace: float | None) -> None:
            graces.append((grace, len(running)))
            running.add(grace)
            try:
                if grace is None:
                    await end(None)
                else:
                    stop.hurry.set()
                    await asyncio.Event().wait()
            finally:
                running.remove(grace)

        monkeypatch.setattr(type(serving.server), "stop", noted)
        stop.set()
        async with asyncio.timeout(HUNG_S):
            await run(serving, stop, linger_s=0.0, drain_s=9.0)
        return graces

    assert asyncio.run(scene()) == [(9.0, 0), (None, 0)]


def test_streams_that_run_through_one_that_leaves_come_to_their_end() -> None:
    async def scene() -> None:
        stop = Stop()
        async with asyncio.timeout(HUNG_S), leaving(stop, linger_s=0.0, drain_s=1000.0) as (lists, channel):
            lists.tell(member(1, "10.0.0.1:1"))
            await serving(channel, "readiness", health_pb2.HealthCheckResponse.SERVING)
            call = await open_stream(channel)
            stop.set()
            with pytest.raises(grpc.aio.AioRpcError):
                await until(channel, lambda _: False)
            assert await passes(call, b"data: 1")
            assert await passes(call, b"data: [DONE]", is_last=True)
            await call.done_writing()
            assert await call.read() is EOF
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(scene())


def test_one_that_can_not_follow_routers_any_more_ends_and_does_not_pick_old_ones() -> None:
    class Blind:
        async def run(self) -> None:
            raise ZeroDivisionError

    async def scene() -> None:
        built = build(PickerConfig(bootstrap=("127.0.0.1:1",), port=0, plain_text=True))
        blind: Any = Blind()
        async with asyncio.timeout(HUNG_S):
            with pytest.raises(ExceptionGroup) as ended:
                await run(replace(built, watcher=blind), Stop(), linger_s=0.0, drain_s=0.0)
        assert isinstance(ended.value.exceptions[0], ZeroDivisionError)

    asyncio.run(scene())


@pytest.mark.integration
def test_a_gateway_is_shown_a_certificate_if_none_is_given() -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")

    async def scene() -> None:
        serving = build(PickerConfig(bootstrap=("127.0.0.1:1",), port=0))
        stop = Stop()
        task = asyncio.create_task(run(serving, stop, linger_s=0.0, drain_s=0.0))
        shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", serving.port), timeout=HUNG_S)
        credentials = grpc.ssl_channel_credentials(shown.encode())
        named = [("grpc.ssl_target_name_override", "diptych-picker")]
        async with grpc.aio.secure_channel(f"127.0.0.1:{serving.port}", credentials, named) as channel:
            assert (await asked(channel)).immediate_response.status.code == 503
        stop.set()
        await task

    asyncio.run(scene())


@pytest.mark.integration
def test_without_a_command_that_makes_one_it_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no openssl command .*--cert-file and --key-file, or --plain-text"):
        self_made()


def test_a_router_that_has_no_pair_is_not_picked_beside_one_that_has() -> None:
    serving, failing = member(1, "10.0.0.1:41"), member(2, "10.0.0.2:41", not_ready="no decode worker is usable")
    assert endpoints([failing, serving], 8000) == {"10.0.0.1:8000"}
    of_the_same = member(3, "10.0.0.1:42", not_ready="it starts")
    assert endpoints([failing, serving, of_the_same, member(4, "10.0.0.4:1")], 8000) == {"10.0.0.4:8000"}
    assert endpoints([failing], 8000) == {"10.0.0.2:8000"}, "it says why, and starts workers"


def test_a_router_that_tells_a_name_is_left_out_and_its_operator_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    instances = [member(1, "10.0.0.1:41"), member(2, "router-7.local:41")]
    assert endpoints(instances, 8000) == {"10.0.0.1:8000"}
    picker = Picker(8000)
    picker.heard(instances)
    picker.heard(instances)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "router-7.local" in told
    assert "--advertise-host" in told


def test_processes_of_a_router_are_one_endpoint_and_addresses_may_be_of_ipv6() -> None:
    instances = [member(1, "10.0.0.1:41"), member(2, "10.0.0.1:42"), member(3, "[fd00::1]:43")]
    assert endpoints(instances, 8000) == {"10.0.0.1:8000", "[fd00::1]:8000"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cert-file=a.pem"], "--cert-file and --key-file belong together"),
        (["--endpoint-port=0"], "must be ports"),
        (["--drain-s=-1"], "must be 0 or more"),
        (["--plain-text", "--cert-file=a.pem", "--key-file=a.pem"], "--plain-text shows no certificate"),
        (["--cert-file=none.pem", "--key-file=none.pem"], "none.pem can't be read"),
    ],
)
def test_what_cannot_be_is_refused_in_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["picker", "--bootstrap=127.0.0.1:1", *words])
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    assert said in capsys.readouterr().err
