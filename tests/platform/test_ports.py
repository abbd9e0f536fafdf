"""What a running platform listens on, port by port, and what a stranger gets there."""

from __future__ import annotations

import http.client
import os
import queue
import re
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import INSECURE, TrustConfig
from diptych.v1 import bootstrap_pb2, bootstrap_pb2_grpc, inference_pb2, worker_pb2, worker_pb2_grpc

Platform = Any
NOBODY = 0xBAD


def listening(process: psutil.Process) -> list[int]:
    """The TCP ports of a process, all of which only this machine reaches."""
    found = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {address.ip.removeprefix("::ffff:") for address in found} <= {"127.0.0.1"}, process.cmdline()
    assert process.net_connections("udp") == []
    return sorted(address.port for address in found)


def kind_of(port: int) -> str:
    """What a stranger finds at a port."""
    for path in ("/v1/models", "/health/live", "/metrics"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=200) as answer:
                assert answer.status == 200
                return f"HTTP {path}"
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, http.client.HTTPException):
            break
    return _grpc_kind(port)


def _grpc_kind(port: int) -> str:
    calls = (
        (bootstrap_pb2_grpc.BootstrapStub, "Watch", bootstrap_pb2.WatchRequest()),
        (worker_pb2_grpc.WorkerStub, "GetStatus", worker_pb2.StatusRequest()),
    )
    codes = set()
    with open_sync_channel(f"127.0.0.1:{port}", INSECURE) as channel:
        for stub, name, request in calls:
            try:
                list(getattr(stub(channel), name)(request, timeout=200))
            except grpc.RpcError as error:
                codes.add(error.code().name)
    return f"gRPC {' '.join(codes)}"


def test_every_port_is_accounted_for_and_open_to_this_machine_only(platform: Platform) -> None:
    refused, health = "gRPC UNAUTHENTICATED", "HTTP /health/live"
    expected = {
        "bootstrap": [refused, health],
        "prefill": [refused, health, "HTTP /metrics"],
        "decode": [refused, health, "HTTP /metrics"],
        "router": ["gRPC UNIMPLEMENTED", health, "HTTP /v1/models"],
    }
    known = set(listening(platform.tree()[0]))
    assert known == set(), "diptych up listens to nobody"
    for name, kinds in expected.items():
        (component,) = platform.components(name)
        ports = listening(component)
        assert sorted(map(kind_of, ports)) == sorted(kinds), name
        known.update(ports)
        for scheduler in component.children():
            known.update(listening(scheduler))  # UCX; each of its messages carries a key
    assert known == {port for process in platform.tree() for port in listening(process)}


HEADS = {
    431: (b"GET /metrics HTTP/1.1\r\na: " + b"x" * 2**15, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n"),
    414: (b"GET /" + b"x" * 2**13 + b" HTTP/1.1\r\n\r\n",),
}


def status_of(port: int, sent: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=200) as connection:
        connection.sendall(sent)
        return int(connection.recv(100).split()[1])


def test_no_http_port_takes_a_head_without_bounds(platform: Platform) -> None:
    num_ports = 0
    for name in ("bootstrap", "prefill", "decode", "router"):
        (component,) = platform.components(name)
        http = [port for port in listening(component) if kind_of(port).startswith("HTTP")]
        found = [(status_of(port, head), status) for port in http for status, heads in HEADS.items() for head in heads]
        assert found == [(status, status) for _, status in found], name
        num_ports += len(http)
    assert num_ports == 7


def test_sockets_between_processes_lie_in_folders_of_one_user(platform: Platform) -> None:
    found = {each.laddr for process in platform.tree() for each in process.net_connections("unix")}
    folders = {Path(path).parent for path in found if path.startswith("/")}
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders if folder.exists())


def test_no_process_shows_the_token(platform: Platform) -> None:
    token = os.environ["DIPTYCH_AUTH_TOKEN"]
    assert not any(token in word for process in platform.tree() for word in process.cmdline())
    assert token not in platform.log.read_text()
    _, *started = platform.tree()
    assert len(started) >= 6, "components, a scheduler of each worker, and what checks grammars"
    shown = {process.pid: list(process.environ().values()) for process in started}
    assert all(shown.values())
    assert [process.cmdline() for process in started if any(token in each for each in shown[process.pid])] == []


def test_a_refusal_is_counted_where_prometheus_looks(platform: Platform) -> None:
    worker = next(each for each in platform.instances() if each.role != bootstrap_pb2.ROLE_ROUTER)
    assert kind_of(int(worker.address.rpartition(":")[2])) == "gRPC UNAUTHENTICATED"
    with urllib.request.urlopen(f"http://{worker.metrics_address}/metrics", timeout=200) as answer:
        assert re.search(r'^diptych_auth_refusals_total{reason="no_token"} [1-9]', answer.read().decode(), re.M)


@pytest.mark.parametrize(
    ("role", "code"),
    [
        (bootstrap_pb2.ROLE_DECODE, worker_pb2.ERROR_CODE_PEER_LOST),
        (bootstrap_pb2.ROLE_PREFILL, worker_pb2.ERROR_CODE_ABORTED),  # it waits for the peer, until told not to
    ],
)
def test_no_worker_connects_to_a_peer_that_a_request_names(platform: Platform, role: int, code: int) -> None:
    (worker,) = [each for each in platform.instances() if each.role == role]
    scheduler = next(each for name in ("prefill", "decode") for each in platform.components(name)).children()
    before = sorted(listening(scheduler[0]))
    leg = worker_pb2.StartLeg(room=7, peer_instance_id=NOBODY, prompt_token_ids=[1, 2, 3], compat=worker.compat)
    leg.sampling.CopyFrom(inference_pb2.SamplingParams(max_tokens=4, top_p=1.0))
    leg.kind = worker_pb2.LEG_KIND_DECODE if role == bootstrap_pb2.ROLE_DECODE else worker_pb2.LEG_KIND_PREFILL
    to_send: queue.SimpleQueue[worker_pb2.RouterBatch | None] = queue.SimpleQueue()
    with open_sync_channel(worker.address, TrustConfig().trust()) as channel:
        batches = worker_pb2_grpc.WorkerStub(channel).Session(iter(to_send.get, None), timeout=200)
        to_send.put(worker_pb2.RouterBatch(start=[leg]))
        to_send.put(worker_pb2.RouterBatch(abort=[leg.room]))
        (output,) = next(batch.outputs for batch in batches if batch.outputs)
        to_send.put(None)
    assert (output.room, output.error.code) == (7, code), output.error.message
    status = next(each for each in platform.statuses() if each.instance.instance_id == worker.instance_id)
    assert [link.peer_instance_id for link in status.links] == [
        each.instance_id for each in platform.instances() if each.role not in (role, bootstrap_pb2.ROLE_ROUTER)
    ]
    assert sorted(listening(scheduler[0])) == before
    platform.assert_clean()
