from __future__ import annotations

import pytest

from diptych.router.choose.fits import Curve
from diptych.router.pool_metrics import PoolMember, PoolMetrics
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    Instance,
    InstanceState,
    Role,
    WorkerLoad,
)


def member(role: Role, pool: str, load: WorkerLoad, state: InstanceState = INSTANCE_STATE_READY) -> PoolMember:
    return PoolMember(Instance(role=role, pool=pool, state=state), load, Curve(0.1, 0.001))


def test_a_pool_is_the_sum_of_its_ready_workers() -> None:
    waiting = WorkerLoad(waiting_tokens=3000, blocked_tokens=1000, num_waiting=2)
    half_full = WorkerLoad(free_pages=50, total_pages=100, num_running=5, num_waiting=5, num_ungranted=5)
    members = [
        member(ROLE_PREFILL, "a", waiting),
        member(ROLE_PREFILL, "a", waiting),
        member(ROLE_PREFILL, "a", waiting, INSTANCE_STATE_DRAINING),
        member(ROLE_DECODE, "a", half_full),
        member(ROLE_DECODE, "b", half_full),
    ]
    families = PoolMetrics(lambda: members).collect()
    found = {(each.name.removeprefix("diptych_router_pool_"), *each.labels.values()): each.value
             for family in families for each in family.samples}  # fmt: skip
    assert found["workers", "prefill", "a", "ready"] == 2
    assert found["workers", "prefill", "a", "draining"] == 1
    assert found["prefill_backlog_seconds", "prefill", "a"] == pytest.approx(4.0)
    assert found["requests_waiting", "prefill", "a"] == 4
    assert found["kv_full_workers", "decode", "a"] == 1.0
    assert found["requests_running", "decode", "b"] == 5
