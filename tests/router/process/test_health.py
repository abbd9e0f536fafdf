"""What a router says of itself, and how it introduces itself to workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.common.verdicts.probes import Verdict
from diptych.router.process.health import CUT_OFF_S, MAX_PROBLEM_LEN, STALL_S, RouterHealth
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

    def is_cut_off(self) -> bool:
        return False

    async def wait_for_change(self) -> None:
        await asyncio.Event().wait()


def test_a_loop_that_hangs_is_death_and_drain_is_not() -> None:
    now_s = 100.0
    health = RouterHealth(Nobody(), clock=lambda: now_s)
    now_s += STALL_S
    assert health.probes.live() == Verdict(True, "every loop runs")
    now_s += 1.0
    assert health.probes.live() == Verdict(False, f"the event loop has not come round for {STALL_S + 1:.1f} s")
    assert health.probes.ready() == health.probes.live()
    health.drain()
    assert health.probes.ready() == Verdict(False, "draining")


class Pairs:
    """A fleet that is what it is told to be."""

    def __init__(self) -> None:
        self.told: str | None = "nobody is there"
        self.is_lost = False
        self.changed = asyncio.Event()

    def problem(self) -> str | None:
        return self.told

    def is_cut_off(self) -> bool:
        return self.is_lost

    async def wait_for_change(self) -> None:
        self.changed.clear()
        await self.changed.wait()

    async def become(self, problem: str | None, *, is_lost: bool = False) -> None:
        self.told, self.is_lost = problem, is_lost
        self.changed.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_a_router_that_has_had_a_pair_stays_to_say_that_there_is_none_unless_it_is_cut_off_itself() -> None:
    asyncio.run(lose_pairs())


async def lose_pairs() -> None:
    now_s = 100.0
    pairs = Pairs()
    health = RouterHealth(pairs, clock=lambda: now_s)
    answers = health.probes.by_name()["answers"]
    assert answers() == Verdict(False, "it starts")
    running = asyncio.create_task(health.run())
    await pairs.become("nobody is there")
    assert answers() == Verdict(False, "nobody is there"), "others of the Service may have a pair already"
    await pairs.become(None)
    assert answers() == health.probes.ready() == Verdict(True, "at least one pair of workers is ready")
    await pairs.become("all are gone")
    assert (answers(), health.probes.ready().is_good) == (Verdict(True, "answers 503: all are gone"), False)
    await pairs.become("no session", is_lost=True)
    assert answers() == Verdict(True, "answers 503: no session"), "whoever died is listed for a moment"
    now_s += CUT_OFF_S + 0.1
    health._heartbeat.last_s = now_s
    words = "a worker that is listed can't be reached from here: no session"
    assert answers() == Verdict(False, words), "another router may reach it"
    await pairs.become("all are gone")
    assert answers().is_good
    health.drain()
    assert answers() == Verdict(False, "draining")
    running.cancel()


def test_what_members_are_told_of_a_routers_pairs_is_one_line_and_told_when_it_changes() -> None:
    async def scene() -> None:
        pairs, told = Pairs(), []
        health = RouterHealth(pairs)
        health.add_listener(lambda: told.append(health.problem))
        assert health.problem == "it starts"
        running = asyncio.create_task(health.run())
        await pairs.become("nobody\nis there")
        await pairs.become("nobody\nis there")
        await pairs.become(None)
        await pairs.become("x" * 10_000)
        running.cancel()
        assert told == ["nobody is there", "", "x" * MAX_PROBLEM_LEN]

    asyncio.run(scene())


def test_the_probe_of_a_routers_service_stays_good_when_its_pairs_are_gone(start_cluster: Any) -> None:
    cluster = start_cluster(lost_pair_wait_s=0.01)
    cluster.wait_until(lambda: health(cluster, "answers") == (200, "at least one pair of workers is ready"))
    cluster.publish()
    cluster.wait_until(lambda: health(cluster, "ready")[0] == 503)
    status, reason = health(cluster, "answers")
    assert (status, reason[:13]) == (200, "answers 503: ")
