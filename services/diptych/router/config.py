"""Flags of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.logging import LogConfig
from diptych.engine.loader.load_format import LoadFormat

PolicyName = Literal["least_load", "round_robin"]


@dataclass(frozen=True, slots=True)
class RouterConfig(LogConfig):
    """Take requests over HTTP and gRPC, and have each served by a pair of workers."""

    model: str = option("smollm2", help="name or path of the model that the workers serve; for its tokenizer")
    load_format: LoadFormat = option("auto", help="the workers'; a dummy model may lack a tokenizer")
    bootstrap: tuple[str, ...] = option(("127.0.0.1:7000",), help="addresses of the bootstrap replicas")
    host: str = option("127.0.0.1", help="address to listen on")
    http_port: int = option(8000, help="port of the HTTP API; 0: any free one")
    grpc_port: int = option(9000, help="port of the gRPC API; 0: any free one")
    drain_s: float = option(5.0, help="seconds that running requests get to finish after SIGTERM")
    policy: PolicyName = option("least_load", help="how to choose the pair for a request", group="routing")
    pair_wait_s: float = option(1.5, help="how long a new request waits for a pair of workers", group="routing")
    lost_pair_wait_s: float = option(
        1.5, help="how long a request that lost a worker waits for another pair", group="routing"
    )
    runtime_lora: bool = option(False, help="let clients load and unload adapters over HTTP", group="adapters")
    max_concurrent: int = option(1024, help="requests at once; more get 429", group="limits")
    max_body_bytes: int = option(8 << 20, help="longest request body or gRPC message", group="limits")
    request_timeout_s: float = option(600.0, help="a request that takes longer ends with 504", group="limits")
    tokenizer_threads: int = option(2, help="threads that render templates and tokenise", group="limits")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        if not self.bootstrap:
            raise ConfigError("--bootstrap needs the address of at least one bootstrap replica")
        for name in ("max_concurrent", "max_body_bytes", "request_timeout_s", "tokenizer_threads"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
