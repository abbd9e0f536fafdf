"""`diptych planner`: what it reads of a platform, and that it plans by it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from diptych.cli.planner import PlanMetrics, PlannerConfig, Watcher, counts_of, sizes_of
from diptych.common.errors import ConfigError
from diptych.engine.values.step_model import H200_LLAMA_8B
from diptych.planner.counters import Counts
from diptych.planner.values import Sizes, Why
from diptych.router.metrics import RouterMetrics
from diptych.router.values.slo_tiers import NO_TIER
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_UNIFIED,
    Instance,
    InstanceState,
    Role,
    WorkerLoad,
)

CONFIG = PlannerConfig(gpus=8, least=("unified=1",))


def worker(
    number: int, role: Role = ROLE_UNIFIED, state: InstanceState = INSTANCE_STATE_READY, num_running: int = 0
) -> Instance:
    load = WorkerLoad(num_running=num_running, total_pages=50_000, free_pages=50_000)
    return Instance(instance_id=number, role=role, state=state, load=load)


def test_a_routers_page_is_read_as_what_it_counted() -> None:
    metrics = RouterMetrics()
    for api in ("chat", "completions", "tokens"):
        metrics.requests.labels(api, "ok").inc()
        metrics.requests.labels(api, "invalid").inc()
    metrics.finished(NO_TIER, 0.1, 0.01, 1.0)
    metrics.prompt_tokens.inc(100)
    metrics.output_tokens.inc(30)
    assert counts_of(metrics.exposition().decode()) == Counts(2, 1, 100, 0, 30, 0)
    with pytest.raises(ValueError, match="requests_running"):
        counts_of("nothing 1\n")


def test_a_load_that_is_too_much_is_seen_planned_for_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watcher, metrics = Watcher(CONFIG, H200_LLAMA_8B), PlanMetrics()
    with caplog.at_level(logging.INFO):
        for number in range(5):
            came = number * 15 * 6.0
            counted = Counts(came, came, came * 8000, 0, came * 100, 10)
            plan = watcher.round(1000.0 + 15 * number, [worker(1)], {"router:1": counted})
            metrics.show(plan)
    assert plan.sizes.total > 1
    assert Why.GROWS in plan.why
    told = [each.message for each in caplog.records]
    assert len(told) == len(set(told)) <= 3
    page = generate_latest(metrics.registry).decode()
    assert f'diptych_planner_workers{{role="unified"}} {float(plan.both)}' in page
    assert 'diptych_planner_reasons_total{why="grows"}' in page


def test_missing_routers_and_loads_are_said() -> None:
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    silent = Instance(instance_id=2, role=ROLE_UNIFIED, state=INSTANCE_STATE_READY)
    plan = watcher.round(0.0, [worker(1), silent], {"router:1": None})
    assert plan.sizes == Sizes(both=2)
    assert plan.why == {Why.LOAD_UNKNOWN}
    unsaid = Watcher(replace(CONFIG, gpus=0), H200_LLAMA_8B)
    assert Why.BUDGET_UNKNOWN in unsaid.round(0.0, [worker(1)], {}).why


def test_roles_and_states_are_those_of_the_members() -> None:
    watcher = Watcher(CONFIG, H200_LLAMA_8B)
    there = [worker(1, ROLE_PREFILL), worker(2, ROLE_DECODE, num_running=3), worker(3, state=INSTANCE_STATE_DRAINING)]
    for now_s in (0.0, 15.0):
        watcher.round(now_s, there, {"router:1": Counts()})
    assert {mark[0]: since_s for mark, since_s in watcher.since_s.items()} == {1: 0.0, 2: 0.0, 3: 0.0}


def test_floors_are_read() -> None:
    assert sizes_of(["prefill=1", "decode=2"]) == Sizes(1, 2, 0)
    for text in ("both=1", "prefill", "decode=-1"):
        with pytest.raises(ConfigError, match="none of prefill=N"):
            sizes_of([text])


def test_a_plan_that_nobody_carries_out_stays_the_same() -> None:
    watcher, sizes = Watcher(CONFIG, H200_LLAMA_8B), []
    for number in range(40):
        came = number * 15 * 0.5
        counted = Counts(came, came, came * 2000, 0, came * 100, 2)
        plan = watcher.round(1000.0 + 15 * number, [worker(each) for each in range(1, 7)], {"router:1": counted})
        sizes.append(plan.sizes.total)
    assert len(set(sizes[25:])) == 1
    assert sizes[-1] < 6
    assert Why.CHANGED_BY_OTHERS not in plan.why


@pytest.mark.parametrize("value", [{"gpus": -1}, {"interval_s": 60.0}, {"ttft_slo_ms": -5.0}, {"metrics_port": 99_999}])
def test_options_that_cannot_be_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(value)).replace("_", "-")):
        replace(CONFIG, **value).validate()
