"""Unified workers and workers that change their role, as a router serves from them."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from diptych.v1 import admin_pb2, admin_pb2_grpc, bootstrap_pb2, worker_pb2

Cluster = Any
SCRIPT = "Zoë says: 你好 🙂! And then some more, until the end."
PREFILL, DECODE, LOCAL = worker_pb2.LEG_KIND_PREFILL, worker_pb2.LEG_KIND_DECODE, worker_pb2.LEG_KIND_LOCAL


def kinds(worker: Any) -> set[int]:
    return {leg.kind for leg in worker.started}


def set_role(worker: Any, role: bootstrap_pb2.Role) -> None:
    with grpc.insecure_channel(worker.instance.address) as channel:
        admin_pb2_grpc.WorkerAdminStub(channel).SetRole(admin_pb2.SetRoleRequest(role=role), timeout=200)


@pytest.fixture
def alone(start_cluster: Any) -> Cluster:
    """One unified worker."""
    cluster = start_cluster(prefill=0, decode=0, unified=1)
    cluster.script = SCRIPT
    return cluster


def test_a_unified_worker_alone_serves_a_request_in_one_leg(alone: Cluster) -> None:
    assert alone.complete("p")["text"] == SCRIPT
    (leg,) = alone.workers[0].started
    assert (leg.kind, leg.peer_instance_id, leg.compat) == (LOCAL, 0, "c")


def test_its_measurements_stand_under_prefill(alone: Cluster) -> None:
    _, answer = alone.post("/v1/completions", {"prompt": "p", "max_tokens": 2000}, {"x-diptych-timings": "1"})
    seen = answer["diptych"]
    assert seen["prefill_instance"] == seen["decode_instance"] == f"{100:016x}"
    assert (seen["prefill_queue_us"], seen["prefill_cached_tokens"], seen["decode_queue_us"]) == (5, 3, 0)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    metrics = alone.get("/metrics")[1]
    assert 'diptych_router_stage_seconds_count{stage="prefill_queue"} 1.0' in metrics
    assert 'diptych_router_stage_seconds_count{stage="decode_join"} 0.0' in metrics
    assert 'diptych_router_legs_open{role="unified"} 0.0' in metrics


def test_its_leg_tells_of_the_prompt_too(alone: Cluster) -> None:
    choice = alone.complete("pq", prompt_logprobs=0, logprobs=0)
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == 2
    assert len(choice["logprobs"]["tokens"]) == len(SCRIPT.encode()) + 1


@pytest.mark.parametrize("after", [0, 1, 5, 40])
@pytest.mark.parametrize("kind", ["error", "break"])
def test_a_local_leg_that_fails_goes_on_exactly(alone: Cluster, fault: Any, kind: str, after: int) -> None:
    alone.workers[0].faults = [fault(kind, after, worker_pb2.ERROR_CODE_RETRACTED)]
    assert alone.complete("p")["text"] == SCRIPT
    assert [leg.num_prior_output_tokens for leg in alone.workers[0].started] == [0, after]


def test_a_client_that_leaves_ends_a_local_leg(alone: Cluster, hang: Any) -> None:
    alone.workers[0].faults = [hang(3)]
    with alone.ask(stream=True):
        alone.wait_for(lambda: alone.workers[0].running)
    alone.wait_for(lambda: alone.workers[0].aborted == [alone.workers[0].started[0].room])


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_two_unified_workers_serve_each_other_in_both_directions(start_cluster: Any, policy: str) -> None:
    cluster = start_cluster(prefill=0, decode=0, unified=2, policy=policy)
    for _ in range(4):
        assert cluster.complete("p")["text"] == "Hello!"
    assert [kinds(worker) for worker in cluster.workers] == [{PREFILL, DECODE}, {PREFILL, DECODE}]


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_a_unified_worker_whose_peers_are_lost_goes_on_alone(start_cluster: Any, policy: str) -> None:
    cluster = start_cluster(prefill=1, decode=0, unified=1, policy=policy)
    unified = cluster.workers[1]
    assert cluster.complete("p")["text"] == "Hello!"
    cluster.publish(unified)
    assert cluster.complete("p")["text"] == "Hello!"
    assert LOCAL in kinds(unified)


def test_a_worker_that_changes_its_role_gets_the_legs_of_the_new_one(start_cluster: Any) -> None:
    cluster = start_cluster(2, 1)
    changing = cluster.prefill(1)
    fleet = cluster.router.fleet
    for role, wanted, num_pairs in (
        (bootstrap_pb2.ROLE_DECODE, {DECODE}, 2),
        (bootstrap_pb2.ROLE_UNIFIED, {PREFILL, DECODE}, 4),
        (bootstrap_pb2.ROLE_PREFILL, {PREFILL}, 2),
    ):
        set_role(changing, role)
        cluster.wait_until(lambda role=role: fleet.session(101).worker.record.role == role)
        cluster.wait_until(lambda num_pairs=num_pairs: len(fleet.pairs()) == num_pairs)
        changing.started.clear()
        for _ in range(6):
            assert cluster.complete("p")["text"] == "Hello!"
        assert kinds(changing) == wanted


def test_a_leg_that_comes_too_late_for_a_role_is_placed_elsewhere(start_cluster: Any) -> None:
    cluster = start_cluster(2, 1)
    late = cluster.prefill(1)
    late.instance.role = bootstrap_pb2.ROLE_DECODE  # and nobody has heard of it
    for _ in range(4):
        assert cluster.complete("p")["text"] == "Hello!"
    assert kinds(late) == {PREFILL}
    assert late.running == {}


def test_what_began_before_a_change_of_role_ends_well(start_cluster: Any, hang: Any) -> None:
    cluster = start_cluster(1, 2)
    cluster.script = SCRIPT
    cluster.decode(0).faults, cluster.decode(1).faults = [hang(2)], [hang(2)]
    with cluster.ask(stream=True) as answer:
        cluster.wait_for(lambda: cluster.decode(0).running or cluster.decode(1).running)
        busy = next(worker for worker in cluster.workers[1:] if worker.running)
        set_role(busy, bootstrap_pb2.ROLE_PREFILL)
        cluster.wait_until(
            lambda: cluster.router.fleet.session(busy.instance.instance_id).worker.role.value == "prefill"
        )
        cluster.release(busy)
        events = [json.loads(line[6:]) for line in answer.read().splitlines() if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == SCRIPT
    assert 'requests_total{api="completions",outcome="ok"} 1.0' in cluster.get("/metrics")[1]


def test_without_any_worker_for_a_leg_the_answer_says_so(alone: Cluster) -> None:
    set_role(alone.workers[0], bootstrap_pb2.ROLE_DECODE)
    alone.wait_until(lambda: alone.router.fleet.session(100).worker.role.value == "decode")
    status, answer = alone.post("/v1/completions", {"prompt": "p", "max_tokens": 2000})
    assert status == 503
    assert answer["error"]["message"].startswith("no prefill worker for tiny is usable: none is registered; waited ")
