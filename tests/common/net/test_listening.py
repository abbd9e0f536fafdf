"""Servers that listen at `::` are reached by IPv4 and, where there is one, by IPv6."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from typing import Any

import pytest

from diptych.common.health.health import HealthServer
from diptych.common.net.http_server import HttpServer
from diptych.common.net.ports import binding, claim, free_port, reserve_port
from diptych.common.net.rpc import listen, new_server
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import INSECURE
from diptych.common.verdicts.probes import Probes, Verdict

WELL = Probes(*(lambda: Verdict(True, ""),) * 3)


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", (socket.AF_INET, "127.0.0.1")),
        ("worker.example", (socket.AF_INET, "worker.example")),
        ("::1", (socket.AF_INET6, "::1")),
        ("::", (socket.AF_INET6, "::")),
    ],
)
def test_a_host_says_of_which_family_the_socket_is(host: str, bound: tuple[socket.AddressFamily, str]) -> None:
    if bound[0] == socket.AF_INET6 and not reachable() > {"127.0.0.1"}:
        pytest.skip("no IPv6 here")
    assert binding(host) == bound


@pytest.fixture
def _without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *arguments: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *arguments, **options)

    monkeypatch.setattr(socket, "socket", without_ipv6)


@pytest.mark.usefixtures("_without_ipv6")
def test_everywhere_is_ipv4_on_a_machine_without_ipv6() -> None:
    assert binding("::") == (socket.AF_INET, "0.0.0.0")
    assert binding("::1") == (socket.AF_INET6, "::1")  # which can't be listened at, and is told so


def reached_by(port: int) -> set[str]:
    reached = set()
    for host in ("127.0.0.1", "::1"):
        try:
            socket.create_connection((host, port), timeout=200).close()
            reached.add(host)
        except OSError:
            pass
    return reached


def reachable() -> set[str]:
    """What a server that is everywhere must be reached by on this machine."""
    if not socket.has_dualstack_ipv6():
        return {"127.0.0.1"}
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        return reached_by(server.getsockname()[1])


def test_probes_are_answered_everywhere() -> None:
    with HealthServer("::", 0, WELL) as server:
        assert reached_by(server.port) == reachable()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health/live", timeout=200) as answer:
            assert answer.status == 200


def test_ports_are_claimed_and_reserved_everywhere() -> None:
    port = free_port("::")
    assert claim("::", port, flag="--port") == port
    with reserve_port("::") as keeper:
        assert keeper.getsockname()[1]


async def no_app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody asks")


def test_http_and_grpc_listen_everywhere() -> None:
    async def test() -> None:
        http = HttpServer(no_app, "::", 0, stop_grace_s=1)
        serving = asyncio.ensure_future(http.run())
        assert reached_by(http.port) == reachable()
        http.stop()
        await serving
        server = new_server(INSECURE, Refusals())
        port = listen(server, "::", 0, INSECURE)
        await server.start()
        assert reached_by(port) == reachable()
        await server.stop(None)

    asyncio.run(test())
