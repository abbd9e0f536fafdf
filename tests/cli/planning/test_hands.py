"""Plans that are carried out: what reaches Kubernetes and workers, and what becomes of what fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
import pytest
from kubernetes_server import Server

from diptych.cli.planning.config import PlannerConfig
from diptych.cli.planning.hands import Hands
from diptych.common.members.kubernetes_api import KubernetesApi
from diptych.common.members.roles import Role
from diptych.common.trust.trust import INSECURE
from diptych.planner.pools.cluster import Pool
from diptych.planner.pools.orders import Orders, Scale, SetRole
from diptych.planner.pools.patience import FIRST_S
from diptych.v1.admin_pb2 import DrainRequest, DrainResponse, SetRoleRequest, SetRoleResponse
from diptych.v1.admin_pb2_grpc import WorkerAdminServicer, add_WorkerAdminServicer_to_server
from diptych.v1.bootstrap_pb2 import ROLE_DECODE, ROLE_PREFILL, Instance
from diptych.v1.worker_pb2 import StatusRequest, WorkerStatus
from diptych.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

SCALE = "/apis/apps/v1/namespaces/llm/deployments/d/scale"
POOL = Pool("d", ("decode", "default"), Role.DECODE, 2, "77")


@dataclass
class Worker(WorkerAdminServicer, WorkerServicer):
    """A worker's side of what may be asked of it."""

    asked: list[DrainRequest | SetRoleRequest] = field(default_factory=list)
    refuses: bool = False

    def Drain(self, request: DrainRequest, context: grpc.ServicerContext) -> DrainResponse:
        self.asked.append(request)
        if self.refuses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "it wants an operator")
        return DrainResponse()

    def GetStatus(self, request: StatusRequest, context: grpc.ServicerContext) -> WorkerStatus:
        return WorkerStatus()

    def SetRole(self, request: SetRoleRequest, context: grpc.ServicerContext) -> SetRoleResponse:
        self.asked.append(request)
        return SetRoleResponse()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def listed(worker: Worker) -> Iterator[dict[int, Instance]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_WorkerAdminServicer_to_server(worker, server)
    add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield {1: Instance(instance_id=1, role=ROLE_DECODE, address=f"127.0.0.1:{port}")}
    server.stop(None).wait()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hands(api: KubernetesApi, clock: Clock) -> Iterator[Hands]:
    hands = Hands(PlannerConfig(drain_s=2.0), api, INSECURE, clock)
    yield hands
    hands.close()


def test_a_deployment_is_scaled_as_it_was_read(hands: Hands, server: Server) -> None:
    hands.carry_out(Orders(scales=(Scale(POOL, 3),)), {})
    assert server.patched == [
        (SCALE, "application/merge-patch+json", {"metadata": {"resourceVersion": "77"}, "spec": {"replicas": 3}})
    ]


def test_what_has_changed_since_it_was_read_has_not_failed_and_is_written_in_the_next_round(
    hands: Hands, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.conflicts = {SCALE}
    order = Orders(scales=(Scale(POOL, 3),))
    for _ in range(3):
        hands.carry_out(order, {})
    assert not server.patched
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    server.conflicts = set()
    hands.carry_out(order, {})
    assert len(server.patched) == 1


def test_a_write_that_fails_is_left_alone_for_a_while(hands: Hands, server: Server, clock: Clock) -> None:
    order, server.token = Orders(scales=(Scale(POOL, 3),)), "another"
    hands.carry_out(order, {})
    server.token = "first"
    hands.carry_out(order, {})
    assert len(server.patched) == 1  # the one that was refused
    clock.now_s = FIRST_S
    hands.carry_out(order, {})
    assert len(server.patched) == 2


def test_workers_drain_in_their_own_time(hands: Hands, worker: Worker, listed: dict[int, Instance]) -> None:
    hands.carry_out(Orders(drains=(1,)), listed)
    assert worker.asked == [DrainRequest(instance_id=1)]


def test_a_worker_that_refuses_is_told_of_and_left_alone_for_a_while(
    hands: Hands, worker: Worker, listed: dict[int, Instance], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    worker.refuses = True
    for _ in range(3):
        hands.carry_out(Orders(drains=(1,)), listed)
    assert len(worker.asked) == 1
    assert "does not drain: it wants an operator; tried again in 15 s" in caplog.text


def test_a_role_changes_beside_the_rounds_and_is_known_until_it_has(
    hands: Hands, worker: Worker, listed: dict[int, Instance]
) -> None:
    order = Orders(roles=(SetRole(1, Role.PREFILL),))
    hands.carry_out(order, listed)
    for _, done in hands._flips.values():
        done.result(60)
    assert worker.asked == [SetRoleRequest(instance_id=1, role=ROLE_PREFILL, drain_ms=2000)]
    assert hands.flipping == {}


def test_what_is_left_undone_is_said_once(hands: Hands, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for _ in range(3):
            hands.carry_out(Orders(left=("d is left alone",)), {})
    assert caplog.text.count("d is left alone") == 1
