"""Tells a gateway which router gets each request: `diptych picker`, an endpoint picker of the Gateway API.

A gateway with an InferencePool calls it for each request, over Envoy's external processing; see `picking`. It is asked
before a request goes anywhere and holds nothing but counts, so several may run, and one may be killed at any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2_grpc

from diptych.cli.picking.choice import Routers
from diptych.cli.picking.exchange import Exchange
from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.common import event_loop
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.health.grpc_health import GrpcHealth
from diptych.common.logging import LogConfig, setup
from diptych.common.members.membership_client import MembershipWatcher
from diptych.common.net.ports import binding
from diptych.common.net.reachable import bracketed
from diptych.common.net.rpc import MAX_CALLS, SERVER_OPTIONS
from diptych.common.verdicts.probes import Probes, Verdict
from diptych.router.values.request import new_request_id
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, ROLE_ROUTER, Instance
from diptych.v1.ext_proc_pb2 import ProcessingRequest, ProcessingResponse

logger = logging.getLogger(__name__)

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
END_S: Final = 1.0  # for calls that run at the end: gateways then ask another picker, or do without
RUNS: Final = Verdict(True, "the loop runs")


@dataclass(frozen=True)  # no slots, as its base
class PickerConfig(LogConfig, MembersConfig):
    """Tell a gateway which router gets each request, as an endpoint picker of the Gateway API inference extension.

    Whoever reaches the port may ask: gateways have no token of ours. It learns addresses of routers, and no more.
    """

    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 or ::: all")
    port: int = option(9002, help="of Envoy's external processing and of gRPC's health; 0: any that is free")
    endpoint_port: int = option(8000, help="at which routers serve HTTP, as the InferencePool has it")
    cert_file: Path | None = option(None, help="PEM; with --key-file: gateways call over TLS, and show no certificate")
    key_file: Path | None = option(None, help="PEM of its key")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot be."""
        if not 0 <= self.port < 1 << 16 or not 0 < self.endpoint_port < 1 << 16:
            raise ConfigError("--port and --endpoint-port must be ports")
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("--cert-file and --key-file belong together: give both, or neither")


class Picker:
    """Implements the external processor."""

    def __init__(self, endpoint_port: int) -> None:
        self._port = endpoint_port
        self._routers = Routers()
        self._has_heard = False

    def heard(self, instances: Iterable[Instance]) -> None:
        """Take these members for all that there are."""
        self._has_heard = True
        self._routers.are(endpoints(instances, self._port))

    def ready(self) -> Verdict:
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
    """Return where routers take requests, as `ip:port`: processes of one router have one address together."""
    ready = (each for each in instances if each.role == ROLE_ROUTER and each.state == INSTANCE_STATE_READY)
    return {f"{each.address.rpartition(':')[0]}:{port}" for each in ready}


@dataclass(frozen=True, slots=True)
class Serving:
    """What runs, and the port that it has."""

    server: grpc.aio.Server
    port: int
    health: GrpcHealth
    watcher: MembershipWatcher


def main(config: PickerConfig) -> int:
    """Run until SIGTERM; return the exit code."""
    config = located(config)
    setup("picker", config.log_format, config.log_level)
    asyncio.run(event_loop.run_until_signal(lambda stop: _serve(config, stop)))
    return 0


async def _serve(config: PickerConfig, stop: asyncio.Event) -> None:
    await run(build(config), stop)  # gRPC's server belongs to the loop that is running when it is made


def build(config: PickerConfig) -> Serving:
    """Make all parts. Raises `ConfigError` if the port is taken, or a file can't be read."""
    shown = credentials(config)
    watcher = MembershipWatcher(config.bootstrap, config.trust(), without_loads=True)
    picker = Picker(config.endpoint_port)
    watcher.add_listener(lambda: picker.heard(watcher.instances().values()))
    health = GrpcHealth(Probes(lambda: RUNS, picker.ready, picker.ready), [SERVICE])
    server = grpc.aio.server(options=tuple(SERVER_OPTIONS), maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((picker.handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return Serving(server, listen(server, config.host, config.port, shown), health, watcher)


async def run(serving: Serving, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    await serving.server.start()
    logger.info("picking routers at port %d", serving.port)
    watching = asyncio.create_task(serving.watcher.run())
    try:
        await stop.wait()
    finally:
        serving.health.close()
        watching.cancel()
        await serving.server.stop(END_S)


def credentials(config: PickerConfig) -> grpc.ServerCredentials | None:
    """Return what to show to gateways; None: nothing. Raises `ConfigError`."""
    if config.cert_file is None or config.key_file is None:
        return None
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
