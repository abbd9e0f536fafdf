"""Flags of a prefill or decode worker."""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass

from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.engine.runtime.scheduler_config import EngineOptions

TRANSPORTS = ("auto", "shm", "tcp")


@dataclass(frozen=True, slots=True)
class WorkerConfig(EngineOptions):
    """A worker: one scheduler with its KV pool, reached by routers over gRPC and by peers over UCX."""

    bootstrap: str = option("127.0.0.1:7000", help="bootstrap addresses, comma-separated")
    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(0, help="gRPC port; 0: any free one, peers learn it from bootstrap")
    advertise_host: str = option("", help="host that others reach this worker by; empty: the listening address")
    transports: str = option("auto", help="KV transfer: auto, shm or tcp", group="transfer")
    drain_s: int = option(20, help="seconds that running requests get to finish after SIGTERM")
    log_format: str = option("auto", help="auto, json or text", group="logging")
    log_level: str = option("info", help="debug, info, warning or error", group="logging")

    def validate(self) -> None:
        self.engine_options.validate()
        if self.transports not in TRANSPORTS:
            raise ConfigError(f"--transports must be one of {', '.join(TRANSPORTS)}, not {self.transports!r}")

    @property
    def engine_options(self) -> EngineOptions:
        names = [field.name for field in dataclasses.fields(EngineOptions)]
        return EngineOptions(**{name: getattr(self, name) for name in names})

    @property
    def bootstrap_addresses(self) -> list[str]:
        return [address.strip() for address in self.bootstrap.split(",") if address.strip()]

    @property
    def advertised_host(self) -> str:
        if self.advertise_host:
            return self.advertise_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
