"""The membership service: `diptych bootstrap`."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from diptych.bootstrap.server import BootstrapService
from diptych.common import lifecycle
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.logging import LogConfig, setup
from diptych.common.rpc import SERVER_OPTIONS, listen
from diptych.v1 import bootstrap_pb2_grpc

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BootstrapConfig(LogConfig):
    """Know who is alive, and tell everybody."""

    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(7000, help="gRPC port; 0: any free one")
    heartbeat_s: float = option(1.0, help="how often instances report, in seconds")
    lease_s: float = option(3.0, help="an instance that is silent for so many seconds is no longer listed")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        if not 0 < self.heartbeat_s <= self.lease_s / 2:
            raise ConfigError("--lease-s must be at least twice --heartbeat-s: one lost heartbeat must not evict")


def main(config: BootstrapConfig) -> int:
    """Serve until SIGTERM; return the exit code."""
    lifecycle.die_with_supervisor()
    setup("bootstrap", config.log_format, config.log_level)
    asyncio.run(lifecycle.run_until_signal(lambda stop: _serve(config, stop)))
    return 0


async def _serve(config: BootstrapConfig, stop: asyncio.Event) -> None:
    service = BootstrapService(lease_s=config.lease_s, heartbeat_s=config.heartbeat_s)
    health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
    server = grpc.aio.server(options=SERVER_OPTIONS)
    bootstrap_pb2_grpc.add_BootstrapServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    port = listen(server, config.host, config.port)
    await server.start()
    await health_service.set("", health_pb2.HealthCheckResponse.SERVING)
    logger.info("bootstrap at %s:%d", config.host, port)
    async with asyncio.TaskGroup() as tasks:
        expiry = tasks.create_task(service.expire_forever())
        await stop.wait()
        await server.stop(grace=None)
        expiry.cancel()
