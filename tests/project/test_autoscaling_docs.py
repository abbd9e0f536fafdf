"""What the page on autoscaling tells operators to ask for is there, and its examples are of the API that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from diptych.engine.frontend.metrics import load_families
from diptych.router.choose.fits import Curve
from diptych.router.metrics import RouterMetrics
from diptych.router.pool_metrics import PoolMember, PoolMetrics
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, ROLE_DECODE, Instance, WorkerLoad
from diptych.v1.worker_pb2 import WorkerStatus

yaml: Any = pytest.importorskip("yaml")

PAGE = Path(__file__).parents[2] / "docs/operations/autoscaling.md"


def exported() -> str:
    record = Instance(role=ROLE_DECODE, state=INSTANCE_STATE_READY, load=WorkerLoad(waiting_tokens=1, total_pages=1))
    router = RouterMetrics()
    router.registry.register(PoolMetrics(lambda: [PoolMember(record, record.load, Curve(0, 1))]))
    worker = load_families({0: WorkerStatus(instance=record, prefill_tokens_per_s=1)})
    names = [sample.name for family in worker for sample in family.samples]
    return "\n".join([router.exposition().decode(), *names])


def test_every_metric_that_the_page_names_is_exported() -> None:
    named = set(re.findall(r"diptych_(?:worker|router)_[a-z_]+", PAGE.read_text()))
    assert len(named) > 12
    samples = set(re.findall(r"^diptych_\w+", exported(), re.MULTILINE))
    assert named <= samples


def test_the_examples_are_yaml_whose_queries_take_silence_for_an_error() -> None:
    examples: list[Any] = []
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL):
        examples += yaml.safe_load_all(block)
    assert [each["kind"] for each in examples] == ["HorizontalPodAutoscaler"] * 2 + ["ScaledObject"] * 2
    for hpa in examples[:2]:
        assert {metric["pods"]["target"]["type"] for metric in hpa["spec"]["metrics"]} == {"AverageValue"}
    for scaled in examples[2:]:
        for trigger in scaled["spec"]["triggers"]:
            assert "vector(0)" not in trigger["metadata"]["query"], "no series would look like no load"
            assert trigger["metadata"]["ignoreNullValues"] == "false"
