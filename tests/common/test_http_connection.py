from __future__ import annotations

import asyncio
import socket

import uvicorn
import uvloop
from uvicorn.server import ServerState

from diptych.common.http_connection import MAX_UNSENT_BYTES, HttpConnection
from diptych.common.http_server import _listen


def test_a_connection_sends_at_once_and_leaves_little_in_the_kernel() -> None:
    """Under the loop that routers run on. With Nagle's algorithm a second small write waits up to 44 ms."""

    async def accepted() -> tuple[int, int]:
        seen: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

        class Seen(HttpConnection):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                options = (socket.TCP_NODELAY, socket.TCP_NOTSENT_LOWAT)
                accepted_socket = transport.get_extra_info("socket")
                no_delay, unsent = (accepted_socket.getsockopt(socket.IPPROTO_TCP, option) for option in options)
                seen.set_result((no_delay, unsent))

        config, listener = uvicorn.Config("nothing:here", interface="asgi3"), _listen("127.0.0.1", 0)
        config.loaded, config.loaded_app, config.ws_protocol_class = True, None, None
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: Seen(config, ServerState(), {}), sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await asyncio.wait_for(seen, 60)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(accepted()) == (1, MAX_UNSENT_BYTES)


def test_a_client_that_connects_and_says_nothing_is_cut_off_like_one_that_is_silent_between_requests() -> None:
    async def bytes_until_the_end() -> bytes:
        config = uvicorn.Config("nothing:here", interface="asgi3", timeout_keep_alive=1)
        config.loaded, config.loaded_app, config.ws_protocol_class = True, None, None
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: HttpConnection(config, ServerState(), {}), "127.0.0.1", 0)
        async with server, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            everything = await reader.read()
            writer.close()
            return everything

    assert asyncio.run(bytes_until_the_end()) == b""
