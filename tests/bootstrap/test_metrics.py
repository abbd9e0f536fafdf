"""What a replica tells Prometheus."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diptych.bootstrap.caller import Limits
from diptych.bootstrap.main import BootstrapMetrics
from diptych.bootstrap.replica import Replica, ReplicaSnapshot
from diptych.common.refusals import Refusals
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Heartbeat, Instance

METRICS = Path(__file__).parents[2] / "docs" / "api" / "metrics.md"


def heartbeat(instance_id: int, role: Any, state: Any, *, at: str) -> bytes:
    instance = Instance(instance_id=instance_id, role=role, state=state, address=at)
    return Heartbeat(sequence=1, instance=instance).SerializeToString()


def snapshot_after(*heartbeats: bytes) -> ReplicaSnapshot:
    replica = Replica(lease_s=3.0, limits=Limits())
    for each in heartbeats:
        replica.receive(each, now_s=100.0)
    return replica.snapshot()


def samples(snapshot: ReplicaSnapshot) -> dict[str, float]:
    refusals = Refusals()
    refusals.note("wrong_token", "ipv4:10.0.0.1:2345", "/m")
    text = BootstrapMetrics(lambda: snapshot, refusals).page().body.decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_members_are_counted_by_role_and_state_and_changes_by_kind() -> None:
    starting, ready = bootstrap_pb2.INSTANCE_STATE_STARTING, bootstrap_pb2.INSTANCE_STATE_READY
    snapshot = snapshot_after(
        heartbeat(1, bootstrap_pb2.ROLE_PREFILL, ready, at="a:1"),
        heartbeat(2, bootstrap_pb2.ROLE_PREFILL, starting, at="a:2"),
        heartbeat(3, bootstrap_pb2.ROLE_ROUTER, ready, at="a:3"),
        heartbeat(4, bootstrap_pb2.ROLE_ROUTER, ready, at="a:3"),
        heartbeat(2, bootstrap_pb2.ROLE_PREFILL, starting, at="a:2"),  # again: no news
    )
    assert samples(snapshot) == {
        'diptych_bootstrap_members{role="prefill",state="ready"}': 1,
        'diptych_bootstrap_members{role="prefill",state="starting"}': 1,
        'diptych_bootstrap_members{role="router",state="ready"}': 1,
        "diptych_bootstrap_watchers": 0,
        "diptych_bootstrap_heartbeats_total": 5,
        "diptych_bootstrap_refused_heartbeats_total": 0,
        "diptych_bootstrap_expirations_total": 0,
        "diptych_bootstrap_evictions_total": 1,
        "diptych_bootstrap_goodbyes_total": 0,
        "diptych_bootstrap_mismatches_total": 0,
        'diptych_auth_refusals_total{reason="no_token"}': 0,
        'diptych_auth_refusals_total{reason="not_permitted"}': 0,
        'diptych_auth_refusals_total{reason="wrong_token"}': 1,
        f'diptych_build_info{{version="{version("diptych")}"}}': 1,
    }
    described = set(re.findall(r"`(diptych_\w+)[`{]", METRICS.read_text()))
    assert {name.partition("{")[0] for name in samples(snapshot)} <= described
