"""Connects components over gRPC: one way to open a channel, one to listen, and the settings of both.

Keepalive notices a peer that vanished without a goodbye (a lost node, a stopped process) in about 15 s; the lease of
bootstrap and the transfer engine are faster where it matters. Reconnecting is quick because peers restart often.

A channel's calls carry a token without gRPC's interceptors, which would touch every message of a stream, and without
credentials of a call, which need TLS: only the making of a call is changed; the call is gRPC's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from diptych.common.errors import ConfigError
from diptych.common.net.ports import binding
from diptych.common.net.reachable import bracketed
from diptych.common.trust.gatekeeper import Gatekeeper
from diptych.common.trust.tls import Tls, TlsContents
from diptych.common.trust.trust import Trust

if TYPE_CHECKING:  # clients count none, and need no Prometheus
    from diptych.common.refusals import Refusals

MAX_MESSAGE_BYTES: Final = 64 * 2**20
MAX_CALLS: Final = 16_384  # a server has at once; bootstrap has two for each member
MAX_CONNECTIONS: Final = 16_384  # a server has at once
MAX_STREAMS: Final = 4096  # calls of a connection at once; a client keeps further ones back

Options = Sequence[tuple[str, int | str]]

_MESSAGE_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
)

SERVER_OPTIONS: Final[Options] = (
    *_MESSAGE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # accept the keepalive of our clients
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server.max_pending_requests", MAX_CALLS),  # that we have not looked at: from 1,000 on gRPC drops any of them
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    ("grpc.server_handshake_timeout_ms", 10_000),  # limit for a client that connects and sends nothing
    ("grpc.max_connection_idle_ms", 300_000),  # limit for a client that connects and calls nothing
    ("grpc.so_reuseport", 0),  # a second server on a port must fail, not share its clients
)

CHANNEL_OPTIONS: Final[Options] = (
    *_MESSAGE_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def open_channel(address: str, trust: Trust, options: Options = ()) -> grpc.aio.Channel:
    """Open a channel for asyncio. Its calls carry the token of their time, its connections the certificate of now."""
    options = (*CHANNEL_OPTIONS, *options)
    if trust.tls is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        options = (*options, ("grpc.ssl_target_name_override", trust.tls.name))
        channel = grpc.aio.secure_channel(address, _channel_credentials(trust.tls), options)
    return AioTokenChannel(channel, trust.metadata)


def open_sync_channel(address: str, trust: Trust) -> grpc.Channel:
    """The same for threads."""
    if trust.tls is None:
        channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
    else:
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", trust.tls.name))
        channel = grpc.secure_channel(address, _channel_credentials(trust.tls), options)
    return TokenChannel(channel, trust.metadata)


def new_server(trust: Trust, refusals: Refusals, options: Options = (), *, own_host: str = "") -> grpc.aio.Server:
    """Return a server that refuses who is not trusted with what it calls. `options` take the place of our usual ones.

    Calls that come from `own_host` are its own.
    """
    return guarded_server(Gatekeeper(trust, refusals, own_host), options)


def guarded_server(guard: grpc.aio.ServerInterceptor, options: Options = ()) -> grpc.aio.Server:  # type: ignore[type-arg]
    """Return a server whose calls `guard` sees first, with our usual options but for `options`."""
    merged = {**dict(SERVER_OPTIONS), **dict(options)}  # if an option is given twice, gRPC uses the first
    return grpc.aio.server(interceptors=[guard], options=tuple(merged.items()), maximum_concurrent_rpcs=MAX_CALLS)


def listen(server: grpc.aio.Server, host: str, port: int, trust: Trust) -> int:
    """Bind `server` and return its port, chosen by the system for 0. Raises `ConfigError` if it is taken."""
    address = f"{bracketed(binding(host)[1])}:{port}"
    try:
        if trust.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _server_credentials(trust.tls))
    except RuntimeError as error:
        raise ConfigError(f"can't listen on {address}: stop what uses this port, or choose another") from error


def _channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    now = tls.current()
    return grpc.ssl_channel_credentials(now.ca, now.key, now.cert)


def _server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return what looks at the files again for each connection."""
    used = tls.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if (now := tls.current()) is used:
            return None  # gRPC goes on with what it has
        used = now
        return _server_configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(used),
        changed,  # type: ignore[arg-type]  # the stubs forget None
        require_client_authentication=True,
    )


def _server_configuration(now: TlsContents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.ca)


Pairs: TypeAlias = tuple[tuple[str, str | bytes], ...]
Metadata: TypeAlias = Callable[[], Pairs]  # asked at each call


def _calls(kind: str) -> Any:
    """Return the method that makes calls of this kind, for both channels."""

    def make(self: TokenChannel | AioTokenChannel, *args: Any, **kwargs: Any) -> _Callable:
        return _Callable(getattr(self._channel, kind)(*args, **kwargs), self._metadata)

    return make


class TokenChannel(grpc.Channel):
    """A channel for threads."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    unary_unary = _calls("unary_unary")
    unary_stream = _calls("unary_stream")
    stream_unary = _calls("stream_unary")
    stream_stream = _calls("stream_stream")

    def subscribe(self, *args: Any, **kwargs: Any) -> None:
        self._channel.subscribe(*args, **kwargs)

    def unsubscribe(self, callback: Any) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> TokenChannel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AioTokenChannel(grpc.aio.Channel):
    """A channel for asyncio."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    unary_unary = _calls("unary_unary")
    unary_stream = _calls("unary_stream")
    stream_unary = _calls("stream_unary")
    stream_stream = _calls("stream_stream")

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> AioTokenChannel:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class _Callable:
    """A method of a stub: adds the metadata to what the caller gives."""

    def __init__(self, method: Any, metadata: Metadata) -> None:
        self._method = method
        self._metadata = metadata

    def __call__(self, *request: Any, metadata: Pairs | None = None, **options: Any) -> Any:
        return self._method(*request, metadata=(*(metadata or ()), *self._metadata()), **options)
