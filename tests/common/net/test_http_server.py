"""A server whose process may have few descriptors."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
import uvloop
from diptych.common.net.http_server import HttpServer

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

async def main():
    server = HttpServer(app, "127.0.0.1", 0, stop_grace_s=1, max_connections=8192)
    print(server.port, flush=True)
    running = asyncio.create_task(server.run())
    await asyncio.to_thread(sys.stdin.read)
    server.stop()
    await running

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""
NUM_PLACES = 96 // 3


def test_more_connections_than_descriptors_end_the_oldest_silent_ones_and_newcomers_are_served() -> None:
    command = [sys.executable, "-c", SCRIPT]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
        ExitStack() as all_,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        address = ("127.0.0.1", int(server.stdout.readline()))
        connections = [all_.enter_context(socket.create_connection(address, 200)) for _ in range(200)]
        connections[-1].sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert connections[-1].recv(100).startswith(b"HTTP/1.1 200 ")
        closed = [connection.recv(1) for connection in connections[:-NUM_PLACES]]
        assert closed == [b""] * (200 - NUM_PLACES)
        server.stdin.close()
        assert server.wait(200) == 0
