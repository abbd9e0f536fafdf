"""Every metric that a component may export is documented, and its histograms reach as far as answers take."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from diptych.bootstrap.main import BootstrapMetrics
from diptych.cli.sizing.planner import PlanMetrics
from diptych.common.build_info import register_certificate_expiry
from diptych.common.refusals import Refusals
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.metrics import TRANSFER_BUCKETS, WorkerMetrics
from diptych.grammars.checks import GrammarChecks
from diptych.router.admission.session_desk import SessionDesk
from diptych.router.config import RouterConfig
from diptych.router.metrics import (
    ANSWER_BUCKETS,
    STAGE_BUCKETS,
    GrammarUsage,
    KeyUsage,
    RouterMetrics,
    SessionLineUsage,
    TokenizerUsage,
)
from diptych.router.pool_metrics import PoolMetrics
from diptych.router.serve.usage_log import UsageLog
from diptych.router.size_metrics import SizeMetrics
from diptych.router.values.served import ITL_BOUNDS, TTFT_BOUNDS
from diptych.v1 import bootstrap_pb2, worker_pb2

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ("docs/api/metrics.md", "docs/operations/autoscaling.md", "docs/operations/planning.md")
ALL_PARTS: Final = worker_pb2.WorkerStatus(  # of a worker with every option
    instance=bootstrap_pb2.Instance(state=bootstrap_pb2.INSTANCE_STATE_READY),
    drain=worker_pb2.Drain(),
    links=[worker_pb2.LinkStatus(state=worker_pb2.LINK_STATE_UP)],
    cache={},
    files={},
    shared={},
    drafting={},
)
WITHIN: Final = {"_Families"}  # of a page that is tested with its owner, or passed on


def collectors(folder: Path) -> Iterator[Collector]:
    """Yield everything that a router registers by an option, and what other components have."""
    yield KeyUsage(cast(Any, SimpleNamespace(holders={}, refusals={})))
    yield GrammarUsage(GrammarChecks())
    yield SessionLineUsage(SessionDesk([], lambda: 0.0))
    yield TokenizerUsage([])
    yield PoolMetrics(lambda: ())
    yield SizeMetrics()
    yield Refusals()
    log = UsageLog(folder / "usage.jsonl")
    yield log
    log.close()


def pages(folder: Path) -> Iterator[str]:
    registry = CollectorRegistry()
    for each in collectors(folder):
        registry.register(each)
    register_certificate_expiry(registry, cast(Any, SimpleNamespace(current=lambda: SimpleNamespace(expires_s=0.0))))
    yield generate_latest(registry).decode()
    yield RouterMetrics().exposition().decode()
    yield WorkerMetrics().exposition({0: ALL_PARTS}, {0: 0}).decode()
    yield generate_latest(PlanMetrics().registry).decode()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    text = "\n".join(pages(tmp_path_factory.mktemp("metrics")))
    return {name for name in re.findall(r"^# TYPE (diptych_\w+)", text, re.M) if not name.endswith("_created")}


def test_every_metric_is_documented(told: set[str]) -> None:
    described = {name for page in PAGES for name in re.findall(r"`(diptych_\w+)[`{]", (ROOT / page).read_text())}
    assert len(told) > 150
    assert {name for name in told - described if name.replace("_kv_shared_", "_kv_file_") not in described} == set()


def test_no_metric_is_documented_that_there_is_not(told: set[str]) -> None:
    described = set(re.findall(r"^\| (`diptych.*?) \|", (ROOT / PAGES[0]).read_text(), re.M))
    names = {name for row in described for name in re.findall(r"`(diptych_\w+)[`{]", row)}
    assert {name for name in names if not name.startswith("diptych_bootstrap_")} - told == set()


def default_of(config: type, name: str) -> float:
    return float(next(cast(float, each.default) for each in dataclasses.fields(config) if each.name == name))


def test_histograms_reach_as_far_as_what_they_measure_may_take() -> None:
    silence_s = default_of(RouterConfig, "request_timeout_s")
    assert min(TTFT_BOUNDS[-1], ITL_BOUNDS[-1], STAGE_BUCKETS[-1]) >= silence_s
    assert ANSWER_BUCKETS[-1] >= 3600, "which docs/api/metrics.md says"
    assert TRANSFER_BUCKETS[-1] >= default_of(WorkerConfig, "kv_transfer_timeout_s")


def test_no_collector_was_forgotten(tmp_path: Path) -> None:
    known = {type(each).__name__ for each in collectors(tmp_path)} | {BootstrapMetrics.__name__} | WITHIN
    texts = (path.read_text() for path in (ROOT / "services").rglob("*.py"))
    found = {name for text in texts for name in re.findall(r"^class (\w+)\(Collector\):", text, re.M)}
    assert found == known
