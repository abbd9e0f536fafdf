"""`diptych router --workers 2`: real processes, with a bootstrap and without workers."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.cli.requests.asking import members
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.event_loop import Stop
from diptych.common.net.ports import claim, claim_for_processes, free_port, free_ports
from diptych.common.trust.tokens import TOKEN_VARIABLE
from diptych.common.trust.trust import TrustConfig
from diptych.common.verdicts.restart_policy import RestartPolicy
from diptych.router.config import RouterConfig
from diptych.router.console.other_routers import OtherRouters
from diptych.router.keys.keyring import digest_of
from diptych.router.process.processes import Processes
from diptych.v1 import bootstrap_pb2

pytestmark = pytest.mark.integration

KEY = "a key"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
TIMEOUT_S = 300.0  # processes start, and a machine may have others
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.05)
    return value


class Routers:
    """A router of two processes, and the bootstrap that it registers with."""

    def __init__(self, model: Path, *options: str, pair_wait_s: float = 2) -> None:
        self.http_port, self.health_port, bootstrap_port = free_ports("127.0.0.1", 3)
        self.bootstrap_address = f"127.0.0.1:{bootstrap_port}"
        self.bootstrap = self._start("bootstrap", f"--port={bootstrap_port}")
        self.process = self._start(
            "router",
            "--workers=2",
            f"--model={model}",
            "--load-format=dummy",
            f"--bootstrap={self.bootstrap_address}",
            f"--http-port={self.http_port}",
            "--grpc-port=0",
            f"--health-port={self.health_port}",
            f"--pair-wait-s={pair_wait_s}",
            *options,
        )

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "GRPC_VERBOSITY": "ERROR"}
        return subprocess.Popen([sys.executable, "-m", "diptych.cli", *command], env=environment)

    def addresses(self) -> dict[str, int]:
        """Return the instance at each address of the router's members."""
        return {each.address: each.instance_id for each in self._members()}

    def metrics_addresses(self) -> dict[str, str]:
        """Return where each of the router's members shows its own metrics."""
        return {each.address: each.metrics_address for each in self._members()}

    def _members(self) -> list[bootstrap_pb2.Instance]:
        try:
            listed = members([self.bootstrap_address], TrustConfig().trust())
        except DiptychError:
            return []
        return [each for each in listed if each.role == bootstrap_pb2.ROLE_ROUTER]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def child_at(self, address: str) -> psutil.Process:
        """The process that listens there."""
        port = int(address.rpartition(":")[2])
        return next(child for child in self.children() if port in listening_ports(child))

    def close(self) -> None:
        for process in (self.process, self.bootstrap):
            process.kill()
            process.wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


@pytest.fixture
def routers(model: Path) -> Iterator[Routers]:
    routers = Routers(model)
    yield routers
    routers.close()


@pytest.fixture
def patient_routers(model: Path) -> Iterator[Routers]:
    """Their only key may have two requests at once."""
    keys = model / "keys.toml"
    keys.write_text(f'[alice]\nsha256 = "{digest_of(KEY).hex()}"\nmax_concurrent = 2\n')
    routers = Routers(model, f"--api-keys-file={keys}", pair_wait_s=TIMEOUT_S)
    yield routers
    routers.close()


def get(url: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=WITH_KEY), timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


def ask(address: str, token: int = 1) -> http.client.HTTPConnection:
    """Send a request, which runs for as long as it waits for workers."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": [token], "max_tokens": 2000}), WITH_KEY)
    return connection


def has_a_place_left(address: str) -> bool:
    """Whether the key may have one more request there: one that is wrong needs a place to be told so."""
    connection = ask(address, token=1 << 20)
    with connection.getresponse() as answer:
        status, words = answer.status, json.load(answer)["error"]["message"]
    connection.close()
    assert status == 400 or "2 requests at once, and 2 are running" in words
    return status == 400


def runs_one_request(routers: Routers, address: str) -> bool:
    return "diptych_router_requests_running 1.0" in get(f"http://{routers.metrics_addresses()[address]}/metrics")


def listening_ports(process: psutil.Process) -> set[int]:
    return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def shows_two_processes(url: str) -> bool:
    return set(re.findall(r'diptych_router_requests_running\{process="(\d)"\}', get(url))) == {"0", "1"}


def verdict(routers: Routers, probe: str) -> str:
    """What the probe of the whole router says, whether it is good or not."""
    try:
        return get(f"http://127.0.0.1:{routers.health_port}/health/{probe}")
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.read().decode()


def has_logged(routers: Routers, words: str) -> bool:
    return words in verdict(routers, "ready")


def test_processes_share_ports_and_are_members_of_their_own_and_one_that_freezes_comes_back(routers: Routers) -> None:
    first = wait_for(lambda: len(found := routers.addresses()) == 2 and found)
    # One that does not answer within two seconds is left out.
    wait_for(partial(shows_two_processes, f"http://127.0.0.1:{routers.health_port}/metrics"))
    for address, own_metrics in routers.metrics_addresses().items():
        assert address != f"127.0.0.1:{routers.http_port}"
        assert "process=" not in get(f"http://{own_metrics}/metrics")
    for address in (f"127.0.0.1:{routers.http_port}", *first):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"http://{address}/metrics")
    wait_for(lambda: "2 of 2" in verdict(routers, "startup"))
    wait_for(lambda: "every loop runs" in verdict(routers, "live"))
    assert_each_is_asked_by_the_others(routers)
    assert_viewers_look_at_one(routers)

    child = routers.children()[0]
    ports = listening_ports(child)
    assert len(ports) == 4
    child.suspend()  # and so it is ended: the kernel would go on to give it connections
    assert not psutil.wait_procs([child], TIMEOUT_S)[1]
    for port in ports:
        with pytest.raises(ConfigError, match="in use"):
            claim("127.0.0.1", port, flag="--port")
    again = wait_for(lambda: (found := routers.addresses()) != first and len(found) == 2 and found)
    assert again.keys() == first.keys()
    assert len(set(again.values()) & set(first.values())) == 1

    children = routers.children()
    assert [child for child in children if os.environ[TOKEN_VARIABLE] in str(child.environ())] == []
    routers.process.send_signal(signal.SIGTERM)
    assert routers.process.wait(TIMEOUT_S) == 0
    assert not psutil.wait_procs(children, TIMEOUT_S)[1]


def assert_each_is_asked_by_the_others(routers: Routers) -> None:
    """For what only it knows."""
    wait_for(lambda: all("no prefill worker" in each.not_ready for each in routers._members()))  # members hear of it
    records = {each.instance_id: each for each in routers._members()}
    ids = sorted(records)
    for own, other in (ids, reversed(ids)):
        others = OtherRouters(Listed(own, records), TrustConfig().trust(), deadline_s=TIMEOUT_S)
        assert asyncio.run(others.ask("/version")).keys() == {other}
        assert others.missing == {}


def assert_viewers_look_at_one(routers: Routers) -> None:
    """Whichever they reached."""
    own = {int(address.rpartition(":")[2]) for address in routers.addresses()}
    with ExitStack() as viewers:
        for address in routers.addresses():
            viewer = viewers.enter_context(closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S)))
            viewer.request("GET", "/console/api/stream?topics=fleet", headers=dict(TrustConfig().trust().metadata()))
            answer = viewers.enter_context(closing(viewer.getresponse()))
            assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
            assert answer.readline() == b"event: ping\n"
        connections = [each for child in routers.children() for each in child.net_connections("tcp")]
        relayed = [each for each in connections if each.raddr and each.raddr.port in own]
        assert len(relayed) == 1, relayed


@dataclass(frozen=True, slots=True)
class Listed:
    """Routers as bootstrap lists them."""

    router_id: int
    records: Mapping[int, bootstrap_pb2.Instance]

    def routers(self) -> Mapping[int, bootstrap_pb2.Instance]:
        return self.records


def test_when_a_process_dies_its_clients_hear_it_and_try_again_and_the_others_requests_go_on(
    patient_routers: Routers,
) -> None:
    wait_for(lambda: len(patient_routers.addresses()) == 2)
    addresses = list(patient_routers.addresses())
    assert all(has_a_place_left(address) for address in addresses)
    dying, staying = [ask(address) for address in addresses]
    for address in addresses:
        wait_for(partial(runs_one_request, patient_routers, address))
    assert not any(has_a_place_left(address) for address in addresses)
    child = patient_routers.child_at(addresses[0])
    child.kill()
    assert not psutil.wait_procs([child], TIMEOUT_S)[1]
    with pytest.raises(ConnectionError):
        dying.getresponse()
    dying.close()
    wait_for(partial(has_a_place_left, addresses[1]))  # what the dead one held
    assert get(f"http://127.0.0.1:{patient_routers.http_port}/v1/models")
    drain(addresses[1], deadline_s=0)
    with staying.getresponse() as answer:
        assert (answer.status, json.load(answer)["error"]["message"]) == (503, "the router is stopping")
    staying.close()


def has_two_ports(process: psutil.Process) -> bool:
    return len(listening_ports(process)) == 2


def drain(address: str, deadline_s: float) -> None:
    headers = {"authorization": f"Bearer {os.environ['DIPTYCH_AUTH_TOKEN']}"}
    url = f"http://{address}/admin/drain?deadline_s={deadline_s}"
    urllib.request.urlopen(urllib.request.Request(url, b"", headers), timeout=TIMEOUT_S).close()


def test_a_drained_process_leaves_the_shared_ports_to_the_others_and_its_state_is_not_the_routers(
    patient_routers: Routers,
) -> None:
    wait_for(lambda: len(patient_routers.addresses()) == 2)
    for address, others in zip(sorted(patient_routers.addresses()), ["none is registered", "draining"], strict=True):
        held = ask(address)
        wait_for(partial(runs_one_request, patient_routers, address))
        child = patient_routers.child_at(address)
        drain(address, deadline_s=0)
        with held.getresponse() as answer:
            assert answer.status == 503
        held.close()
        wait_for(partial(has_two_ports, child))  # of its own: HTTP and probes
        wait_for(partial(has_logged, patient_routers, others))
        assert get(f"http://{address}/health/live")
    patient_routers.process.send_signal(signal.SIGTERM)
    assert patient_routers.process.wait(TIMEOUT_S) == 0


def test_a_second_router_at_a_port_of_one_that_still_starts_is_refused(model: Path) -> None:
    """Their processes could all listen there: connections would be split between two routers."""
    port = free_port()
    both = [start_at(model, f"--http-port={port}", "--grpc-port=0") for _ in range(2)]
    wait_for(lambda: any(process.poll() is not None for process in both))
    refused, running = sorted(both, key=lambda process: process.poll() is None)
    running.kill()
    running.communicate()
    assert f"another router runs, or starts, at 127.0.0.1:{port}" in refused.communicate()[1]
    assert (refused.returncode, running.returncode) == (1, -signal.SIGKILL)


def test_a_router_claims_its_port_of_grpc_as_well(model: Path) -> None:
    port = free_port()
    with claim_for_processes("127.0.0.1", port, flag="--grpc-port"):
        refused = start_at(model, "--http-port=0", f"--grpc-port={port}")
        words = refused.communicate(timeout=TIMEOUT_S)[1]
    assert f"another router runs, or starts, at 127.0.0.1:{port}" in words
    assert refused.returncode == 1


def start_at(model: Path, *ports: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "diptych.cli", "router", "--workers=2", f"--model={model}", *ports)
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


class NoMoreProcesses:
    """Takes the place of what starts processes, on a machine that has no more memory for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_try: Callable[[], object] = lambda: None) -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self._start)
        self._on_try = on_try
        self.num_tries = 0

    async def _start(self, *command: str, **options: Any) -> None:
        self.num_tries += 1
        self._on_try()
        raise OSError("Cannot allocate memory")


def processes(policy: RestartPolicy) -> Processes:
    return Processes(
        RouterConfig(model="m", host="127.0.0.1", workers=1, http_port=0, grpc_port=0, health_port=0), policy
    )


def test_a_process_that_cannot_be_started_is_tried_again_like_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = NoMoreProcesses(monkeypatch)
    assert asyncio.run(processes(RestartPolicy(max_deaths=3, first_delay_s=0.0)).run(Stop())) == 1
    assert machine.num_tries == 3


def test_no_process_is_started_again_once_the_router_was_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> int:
        stop = Stop()
        machine = NoMoreProcesses(monkeypatch, lambda: asyncio.get_running_loop().call_later(0.01, stop.set))
        assert await processes(RestartPolicy(first_delay_s=TIMEOUT_S, max_delay_s=TIMEOUT_S)).run(stop) == 0
        return machine.num_tries

    assert asyncio.run(run()) == 1


def posted(address: str, path: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    connection.request("POST", path, json.dumps(body))
    with connection.getresponse() as answer:
        found = answer.status, json.load(answer)
    connection.close()
    return found


def place_in_line(address: str, session_id: str) -> int:
    """Ask for room for a session, which there is not; return the place that it has in line."""
    body = {"capacity_of_str_len": 9, "session_id": session_id, "wait_s": 0.001}
    status, answer = posted(address, "/open_session", body)
    assert status == 503, answer
    return int(answer["error"]["message"].partition("this one is number ")[2].split()[0])


def test_processes_have_one_line_of_sessions_and_one_that_dies_takes_no_place_along(routers: Routers) -> None:
    first, second = wait_for(lambda: len(found := sorted(routers.addresses())) == 2 and found)
    assert posted(first, "/open_session", {"capacity_of_str_len": 9, "session_id": "t"}) == (200, "t")
    turn = {"input_ids": [1], "session_params": {"id": "t", "rid": "none"}}
    status, answer = posted(second, "/generate", turn)
    assert (status, answer["error"]["param"]) == (400, "session_params.rid"), "it is known there, too"
    assert posted(second, "/close_session", {"session_id": "t"}) == (200, {"was_open": True})
    assert [place_in_line(first, "a"), place_in_line(second, "b"), place_in_line(first, "b")] == [1, 2, 2]
    child = routers.child_at(first)
    child.kill()
    assert not psutil.wait_procs([child], TIMEOUT_S)[1]
    assert [place_in_line(second, name) for name in "cba"] == [3, 2, 1]
    metrics = f"http://127.0.0.1:{routers.health_port}/metrics"
    wait_for(lambda: re.search(r'session_line_waiting\{process="\d"\} 3.0', get(metrics)))
