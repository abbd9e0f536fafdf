"""How `diptych drain` and `diptych status` ask routers: a real HTTP server that answers as told."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from http_serving import serving

from diptych.cli.requests.asking import NEEDS_TOKEN, Answer, ask, ask_to_drain, members
from diptych.common.errors import ConfigError
from diptych.common.trust.tls import Tls
from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import INSECURE, Trust
from diptych.v1.bootstrap_pb2 import ROLE_DECODE, ROLE_ROUTER, Instance, Role
from diptych.v1.worker_pb2 import Drain

TIMEOUT_S = 200.0  # only for what hangs: machines may be busy
OURS = Trust(Tokens.of_variable("0123456789abcdef"), None)


class RouterAt(ThreadingHTTPServer):
    """Whatever instance is here now, and what was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.instance, self.phase, self.leads_to = "00000000000000aa", "draining", ""
        self.asked: list[str] = []

    def listed(self, instance_id: int) -> Instance:
        return Instance(instance_id=instance_id, role=ROLE_ROUTER, address=self.address)


class _Handler(BaseHTTPRequestHandler):
    server: RouterAt

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        progress = {"phase": self.server.phase, "requests_left": 0, "oldest_s": 0.0, "deadline_s": None}
        self.send_response(302 if self.server.leads_to else 200)
        self.send_header("location", self.server.leads_to)
        self.end_headers()
        self.wfile.write(json.dumps({"instances": {self.server.instance: progress}}).encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[RouterAt]:
    with serving(RouterAt()) as server:
        yield server


def test_the_instance_that_is_meant_is_drained_and_no_other_at_its_address(router: RouterAt) -> None:
    answer = ask_to_drain(router.listed(0xAA), 2.0, OURS, TIMEOUT_S)
    assert (answer.problem, answer.drain) == ("", Drain(phase=Drain.PHASE_DRAINING))
    assert router.asked == ["/admin/drain?instance=00000000000000aa&deadline_s=2"]
    assert ask(router.listed(0xBB), OURS, TIMEOUT_S) == Answer(
        router.listed(0xBB), problem="another router has its address", is_gone=True
    )


def test_a_router_that_ends_is_empty(router: RouterAt) -> None:
    router.phase = "gone"
    assert ask(router.listed(0xAA), OURS, TIMEOUT_S).drain == Drain(phase=Drain.PHASE_EMPTY)


def test_the_token_goes_to_no_proxy_and_nowhere_else(router: RouterAt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    router.leads_to = f"http://{router.address}/elsewhere"
    assert ask(router.listed(0xAA), OURS, TIMEOUT_S).problem == "HTTP status 302"
    assert router.asked == ["/admin/drain?"]


def test_with_certificates_alone_a_router_is_listed_and_to_drain_it_wants_a_token(router: RouterAt) -> None:
    by_certificate = Trust(None, Tls.__new__(Tls))
    listed = router.listed(0xAA)
    assert ask(listed, by_certificate, TIMEOUT_S) == Answer(listed)
    assert ask_to_drain(listed, None, by_certificate, TIMEOUT_S) == Answer(listed, problem=NEEDS_TOKEN)
    assert router.asked == []


def test_no_replica_is_an_error_in_words() -> None:
    with pytest.raises(ConfigError, match="names no replica"):
        members((), INSECURE)


@pytest.mark.parametrize("role", [ROLE_ROUTER, ROLE_DECODE])
def test_who_can_not_be_reached_is_silent_and_not_gone(role: Role) -> None:
    with socket.socket() as port:  # bound, and not listening: refuses
        port.bind(("127.0.0.1", 0))
        member = Instance(instance_id=0xAA, role=role, address=f"127.0.0.1:{port.getsockname()[1]}")
        answer = ask(member, OURS, TIMEOUT_S)
    assert answer.problem
    assert not answer.is_gone
