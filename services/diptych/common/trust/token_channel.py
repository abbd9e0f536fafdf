"""Makes channels whose calls carry metadata, without gRPC's interceptors, which would touch every message of a stream.

Credentials of a call, gRPC's own way, need TLS. Here only the making of a call is changed; the call is gRPC's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

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
