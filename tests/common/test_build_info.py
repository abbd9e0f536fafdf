"""What each process tells Prometheus of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from diptych.bootstrap.caller import Limits
from diptych.bootstrap.main import BootstrapMetrics
from diptych.bootstrap.replica import Replica, ReplicaSnapshot
from diptych.common.build_info import register_certificate_expiry
from diptych.common.refusals import Refusals
from diptych.common.trust.tls import Tls
from diptych.engine.frontend.metrics import WorkerMetrics

NAME = "diptych_tls_certificate_expires_timestamp_seconds"
DAY_S = 86_400.0

Authorities = Callable[[str], Any]


def test_the_end_of_a_certificate_is_told_as_it_is_at_each_scrape(new_authority: Authorities, tmp_path: Path) -> None:
    registry, authority = CollectorRegistry(), new_authority("ours")
    register_certificate_expiry(registry, Tls(authority.sign(tmp_path / "member", days=30)))
    assert registry.get_sample_value(NAME) == pytest.approx(time.time() + 30 * DAY_S, abs=600)
    authority.sign(tmp_path / "member", days=60)
    assert registry.get_sample_value(NAME) == pytest.approx(time.time() + 60 * DAY_S, abs=600)


def test_without_a_certificate_nothing_is_told_of_it() -> None:
    registry = CollectorRegistry()
    register_certificate_expiry(registry, None)
    assert registry.get_sample_value(NAME) is None


def test_workers_and_bootstrap_tell_it(new_authority: Authorities, tmp_path: Path) -> None:
    tls = Tls(new_authority("ours").sign(tmp_path / "member"))
    pages = [WorkerMetrics(tls).exposition({}, {}), BootstrapMetrics(snapshot, Refusals(), tls).page().body]
    assert [f"\n{NAME} ".encode() in page for page in pages] == [True, True]


def snapshot() -> ReplicaSnapshot:
    return Replica(lease_s=3.0, limits=Limits()).snapshot()
