"""gRPC settings that every internal connection shares, and one way to listen.

Keepalive notices a peer that vanished without a goodbye (a lost node, a stopped process) in about 15 s; the lease of
bootstrap and the transfer engine are faster where it matters. Reconnecting is quick because peers restart often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc

from diptych.common.errors import ConfigError

MAX_MESSAGE_BYTES: Final = 64 * 2**20

_MESSAGE_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
)

SERVER_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    *_MESSAGE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # accept the keepalive of our clients
    ("grpc.so_reuseport", 0),  # a second server on a port must fail, not share its clients
)

CHANNEL_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    *_MESSAGE_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind `server` and return its port, chosen by the system for 0. Raises `ConfigError` if it is taken."""
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"can't listen on {host}:{port}: stop what uses this port, or choose another") from error
