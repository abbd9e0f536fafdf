"""Tells a gateway which router gets each request: `diptych picker`, an endpoint picker of the Gateway API.

A gateway with an InferencePool calls it for each request, over Envoy's external processing; see `picking`. It holds
nothing but counts, so several may run. But in full duplex, as gateways want it, all of a request and its answer passes
through the picker that was asked: one that is killed ends its streams. So it leaves slowly: it is not ready from the
first moment, takes what still comes for `linger_s`, and then lets what runs finish for `drain_s`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2_grpc

from diptych.cli.picking.certificate import self_made
from diptych.cli.picking.choice import Routers
from diptych.cli.picking.exchange import Exchange
from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.common import event_loop
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.event_loop import LoopHeartbeat, wait_or_timeout
from diptych.common.health.grpc_health import GrpcHealth
from diptych.common.health.health import HealthServer
from diptych.common.logging import LogConfig, setup
from diptych.common.members.membership_client import MembershipWatcher
from diptych.common.net.ports import binding
from diptych.common.net.reachable import bracketed, host_of
from diptych.common.net.rpc import MAX_CALLS, SERVER_OPTIONS
from diptych.common.verdicts.probes import Probes, Verdict, judge_loops
from diptych.router.values.request import new_request_id
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, ROLE_ROUTER, Instance
from diptych.v1.ext_proc_pb2 import ProcessingRequest, ProcessingResponse

logger = logging.getLogger(__name__)

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
END_S: Final = 5  # beyond linger and drain, for what has not ended to be told so
STALL_S: Final = 30.0  # nothing on the loop takes a fraction of that


@dataclass(frozen=True)  # no slots, as its base
class PickerConfig(LogConfig, MembersConfig):
    """Tell a gateway which router gets each request, as an endpoint picker of the Gateway API inference extension.

    Whoever reaches the port may ask: gateways have no token of ours. It learns addresses of routers, and no more.
    """

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 or ::: all")
    port: int = option(9002, help="of Envoy's external processing and of gRPC's health; 0: any that is free")
    endpoint_port: int = option(8000, help="at which routers serve HTTP, as the InferencePool has it")
    health_port: int = option(0, help="HTTP port of probes, which speak no TLS; 0: any that is free")
    cert_file: Path | None = option(None, help="PEM, to show to gateways; not given: one that is made at the start")
    key_file: Path | None = option(None, help="PEM of its key")
    plain_text: bool = option(False, help="gateways call without TLS, which few of them can")
    linger_s: float = option(5.0, help="seconds after SIGTERM in which requests still come")
    drain_s: float = option(600.0, help="seconds after that which requests get to finish: their answers pass here")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot be."""
        if not 0 <= self.port < 1 << 16 or not 0 < self.endpoint_port < 1 << 16:
            raise ConfigError("--port and --endpoint-port must be ports")
        if not (0 <= self.linger_s < math.inf and 0 <= self.drain_s < math.inf):
            raise ConfigError("--linger-s and --drain-s must be 0 or more")
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("--cert-file and --key-file belong together: give both, or neither")
        if self.plain_text and self.cert_file is not None:
            raise ConfigError("--plain-text shows no certificate: leave it out, or --cert-file and --key-file")


class Picker:
    """Implements the external processor."""

    def __init__(self, endpoint_port: int) -> None:
        self._port = endpoint_port
        self._routers = Routers()
        self._has_heard = False
        self._is_leaving = False
        self.heartbeat = LoopHeartbeat()
        self.probes = Probes(self._live, self._ready, self._ready)
        self._unnamable: set[str] = set()

    def heard(self, instances: Collection[Instance]) -> None:
        """Take these members for all that there are."""
        self._has_heard = True
        self._routers.are(endpoints(instances, self._port))
        unnamable = {host for host in routers_by_host(instances) if not is_address(host)}
        for host in unnamable - self._unnamable:
            logger.warning("no gateway is told of the router at %s: that is no IP address (--advertise-host)", host)
        self._unnamable = unnamable

    def leave(self) -> None:
        """Be ready no longer, though who still asks is answered."""
        self._is_leaving = True

    def _live(self) -> Verdict:
        return judge_loops({"the event loop": time.monotonic() - self.heartbeat.last_s}, STALL_S)

    def _ready(self) -> Verdict:
        if self._is_leaving:
            return Verdict(False, "draining")
        if not (live := self._live()).is_good:
            return live
        return Verdict(self._has_heard, "bootstrap has been heard" if self._has_heard else "bootstrap was never heard")

    async def process(self, requests: AsyncIterator[ProcessingRequest], _: Any) -> AsyncIterator[ProcessingResponse]:
        exchange = Exchange(self._routers, new_request_id())
        try:
            async for request in requests:
                response = exchange.answer(request)
                if response is not None:
                    yield response
        finally:
            exchange.close()

    def handler(self) -> Any:
        method = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})


def endpoints(instances: Iterable[Instance], port: int) -> set[str]:
    """Return where requests should go, as `ip:port`, which is all that the protocol knows.

    Routers that have a pair of workers come alone: one that has none answers at once, so that it would have the fewest
    requests of all. Where nobody has one it is all of them: they know why, and start workers that were not needed.
    """
    there = {host: group for host, group in routers_by_host(instances).items() if is_address(host)}
    serving = [host for host, group in there.items() if not any(each.not_ready for each in group)]
    return {f"{bracketed(host)}:{port}" for host in serving or there}


def routers_by_host(instances: Iterable[Instance]) -> dict[str, list[Instance]]:
    """Return the processes that take requests: those of one router have one host, and each gets its part of them."""
    found: dict[str, list[Instance]] = {}
    for each in instances:
        if each.role == ROLE_ROUTER and each.state == INSTANCE_STATE_READY:
            found.setdefault(host_of(each.address), []).append(each)
    return found


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Serving:
    """What runs, and the port that it has."""

    server: grpc.aio.Server
    port: int
    picker: Picker
    health: GrpcHealth
    watcher: MembershipWatcher


def main(config: PickerConfig) -> int:
    """Run until SIGTERM; return the exit code."""
    config = located(config)
    setup("picker", config.log_format, config.log_level)
    grace_s = math.ceil(config.linger_s + config.drain_s) + END_S
    asyncio.run(event_loop.run_until_signal(lambda stop: _serve(config, stop), grace_s=grace_s))
    return 0


async def _serve(config: PickerConfig, stop: event_loop.Stop) -> None:
    serving = build(config)  # gRPC's server belongs to the loop that is running when it is made
    with HealthServer(config.host, config.health_port, serving.picker.probes):
        logger.info("picking routers at port %d", serving.port)
        await run(serving, stop, linger_s=config.linger_s, drain_s=config.drain_s)


def build(config: PickerConfig) -> Serving:
    """Make all parts. Raises `ConfigError` if the port is taken, or a file can't be read."""
    shown = credentials(config)
    watcher = MembershipWatcher(config.bootstrap, config.trust(), without_loads=True)
    picker = Picker(config.endpoint_port)
    watcher.add_listener(lambda: picker.heard(watcher.instances().values()))
    health = GrpcHealth(picker.probes, [SERVICE])
    server = grpc.aio.server(options=tuple(SERVER_OPTIONS), maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((picker.handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return Serving(server, listen(server, config.host, config.port, shown), picker, health, watcher)


async def run(serving: Serving, stop: event_loop.Stop, *, linger_s: float, drain_s: float) -> None:
    """Serve until `stop`, and what still comes for `linger_s`. Then let what runs finish for `drain_s`."""
    await serving.server.start()
    async with asyncio.TaskGroup() as group:  # who can't follow routers any more would pick old ones
        tasks = [group.create_task(each.run()) for each in (serving.watcher, serving.picker.heartbeat)]
        try:
            await stop.wait()
            serving.picker.leave()
            await wait_or_timeout(stop.hurry, linger_s)
            serving.health.close()  # who watches it would hold up the end
            # gRPC crashes where the end of a grace meets a stop without one
            if drain_s > 0 and not stop.hurry.is_set():
                await _drain(serving.server, stop.hurry, drain_s)
        finally:
            for task in tasks:
                task.cancel()
            await serving.server.stop(None)


async def _drain(server: grpc.aio.Server, hurry: asyncio.Event, drain_s: float) -> None:
    """Let what runs finish for `drain_s`, or until `hurry`; no stop of the server is under way afterwards."""
    tasks = asyncio.create_task(server.stop(drain_s)), asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def credentials(config: PickerConfig) -> grpc.ServerCredentials | None:
    """Return what to show to gateways; None: nothing, they call in plain text. Raises `ConfigError`."""
    if config.plain_text:
        return None
    if config.cert_file is None or config.key_file is None:
        return grpc.ssl_server_credentials([self_made()])
    try:
        return grpc.ssl_server_credentials([(config.key_file.read_bytes(), config.cert_file.read_bytes())])
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be read: {error.strerror}") from None


def listen(server: grpc.aio.Server, host: str, port: int, shown: grpc.ServerCredentials | None) -> int:
    """Bind `server` and return its port, chosen by the system for 0. Raises `ConfigError` if it is taken."""
    address = f"{bracketed(binding(host)[1])}:{port}"
    try:
        return server.add_insecure_port(address) if shown is None else server.add_secure_port(address, shown)
    except RuntimeError as error:
        raise ConfigError(f"can't listen on {address}: stop what uses this port, or choose another") from error
