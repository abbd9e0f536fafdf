"""What a router says of itself, and how it introduces itself to workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.common.probes import Verdict
from diptych.router.health import STALL_S, RouterHealth
from diptych.v1 import bootstrap_pb2

Cluster = Any
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health(cluster: Cluster, name: str) -> tuple[int, str]:
    status, body = cluster.get(f"/health/{name}")
    return status, json.loads(body)["reason"]


def test_readiness_follows_the_pairs_and_liveness_does_not(cluster: Cluster) -> None:
    cluster.wait_until(lambda: health(cluster, "ready") == (200, "at least one pair of workers is ready"))
    cluster.publish(cluster.prefill())
    cluster.wait_until(lambda: health(cluster, "ready")[0] == 503)
    assert "no decode worker" in health(cluster, "ready")[1]
    assert [health(cluster, name) for name in ("live", "startup")] == [(200, "every loop runs"), (200, "started")]


def test_grpc_health_tells_the_same(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def statuses() -> list[Any]:
            names = ("", "liveness", "readiness", "diptych.v1.Inference")
            return [stub.Check(health_pb2.HealthCheckRequest(service=name)).status for name in names]

        cluster.wait_until(lambda: statuses() == [SERVING] * 4)
        watched = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=200)
        assert next(watched).status == SERVING
        cluster.publish()
        assert next(watched).status == NOT_SERVING
        assert statuses() == [SERVING, SERVING, NOT_SERVING, NOT_SERVING]
        watched.cancel()


def test_who_watches_a_routers_health_does_not_hold_up_its_end(start_cluster: Any) -> None:
    cluster = start_cluster(drain_s=60.0)
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=200)
        assert next(watched).status == SERVING
        cluster.stop_router()
        assert [each.status for each in watched] == [NOT_SERVING]


def test_a_router_introduces_itself_to_each_worker_first_of_all(cluster: Cluster) -> None:
    cluster.complete("p")
    router_id = cluster.router.fleet.router_id
    assert [worker.routers for worker in cluster.workers] == [[router_id], [router_id]] != [[0], [0]]


def test_a_loaded_worker_is_connected_to_before_it_is_ready(start_cluster: Any) -> None:
    cluster = start_cluster(0, 0)
    worker = cluster.add_worker(7, bootstrap_pb2.ROLE_PREFILL)
    worker.instance.state = bootstrap_pb2.INSTANCE_STATE_STARTING
    cluster.publish(worker)
    cluster.wait_for(lambda: worker.routers)


class Nobody:
    """A fleet without a pair."""

    def problem(self) -> str | None:
        return "nobody is there"

    async def wait_for_change(self) -> None:
        await asyncio.Event().wait()


def test_a_loop_that_hangs_is_death_and_drain_is_not() -> None:
    now_s = 100.0
    health = RouterHealth(Nobody(), clock=lambda: now_s)
    now_s += STALL_S
    assert health.probes.live() == Verdict(True, "every loop runs")
    now_s += 1.0
    assert health.probes.live() == Verdict(False, f"the event loop has not come round for {STALL_S + 1:.1f} s")
    health.drain()
    assert health.probes.ready() == Verdict(False, "draining")
