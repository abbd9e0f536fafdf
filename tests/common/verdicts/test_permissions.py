"""Which party may call what: every method of every service has its place in the table."""

from __future__ import annotations

import pytest
from guarded_server import METHODS

from diptych.common.verdicts.permissions import (
    BY_ITSELF,
    EVERY,
    MAY_CALL,
    NOBODY,
    Party,
    may_call,
    may_call_itself,
    words_for,
)
from diptych.v1 import bench_pb2, engine_pb2, inference_pb2, rank_pb2, transfer_pb2

W, R, O, V = Party.WORKER, Party.ROUTER, Party.OPERATOR, Party.VIEWER  # noqa: E741
FOR_CLIENTS = "/diptych.v1.Inference/"  # who show keys of the API instead


def test_every_method_of_every_service_says_who_may_call_it() -> None:
    packages = (bench_pb2, engine_pb2, inference_pb2, rank_pb2, transfer_pb2)
    services = [each for package in packages for each in package.DESCRIPTOR.services_by_name.values()]
    methods = METHODS | {f"/{service.full_name}/{each.name}" for service in services for each in service.methods}
    internal = {method for method in methods if not method.startswith(FOR_CLIENTS)}
    assert internal == {action for action in MAY_CALL if action.startswith("/diptych.")}
    assert all(MAY_CALL.values())


@pytest.mark.parametrize(
    ("action", "parties"),
    [
        ("/diptych.v1.Bootstrap/Register", {W, R}),
        ("/diptych.v1.Bootstrap/Watch", {W, R, O, V}),
        ("/diptych.v1.Worker/Session", {R}),
        ("/diptych.v1.Worker/GetStatus", {R, O, V}),
        ("/diptych.v1.Worker/Watch", {R, O, V}),
        ("/diptych.v1.WorkerAdmin/LoadLora", {R, O}),
        ("/diptych.v1.WorkerAdmin/UpdateWeights", {O}),
        ("/diptych.v1.WorkerAdmin/SetRole", {O}),
        ("/diptych.v1.WorkerAdmin/SetLogLevel", {O}),
        ("/diptych.v1.WorkerAdmin/Drain", {O}),
        ("POST /drain", {O}),
        ("POST /role", {O}),
        ("POST /admin/drain", {O}),
        ("GET /admin/workers", {R, O, V}),
        ("/diptych.v1.Worker/NotThere", set()),
    ],
)
def test_a_party_may_call_what_its_work_needs(action: str, parties: set[Party]) -> None:
    assert {party for party in Party if may_call(frozenset({party}), action)} == parties
    assert may_call(EVERY, action)
    assert not may_call(NOBODY, action)


def test_from_its_own_host_a_member_is_drained_with_its_own_token_and_no_more() -> None:
    allowed = {(party, action) for party in Party for action in MAY_CALL if may_call_itself(frozenset({party}), action)}
    assert allowed == {
        *((W, action) for action in ("/diptych.v1.Worker/GetStatus", "/diptych.v1.WorkerAdmin/Drain", "POST /drain")),
        (R, "POST /admin/drain"),
    }
    assert BY_ITSELF.keys() < MAY_CALL.keys()


def test_a_refusal_says_what_it_takes() -> None:
    load = "/diptych.v1.WorkerAdmin/LoadLora"
    words = f"{load} is not for the token or certificate of a worker: it takes that of a router or an operator"
    assert words_for(frozenset({W}), load) == words
