"""What a planner reads of routers and of Kubernetes."""

from __future__ import annotations

import math

import pytest
from kubernetes_server import Server

from diptych.cli.planning.sources import cluster_of, counts_of
from diptych.common.errors import Unavailable
from diptych.common.members.kubernetes_api import KubernetesApi
from diptych.common.members.roles import Role
from diptych.generation.slo import Slo
from diptych.planner.counters import Counts
from diptych.planner.pools.cluster import Pool
from diptych.planner.values import Goal
from diptych.router.metrics import RouterMetrics
from diptych.router.values.slo_tiers import NO_TIER, Tier, Tiers


def test_a_routers_page_is_read_as_what_it_counted() -> None:
    metrics = RouterMetrics()
    for api in ("chat", "completions", "tokens"):
        metrics.requests.labels(api, "ok").inc()
        metrics.requests.labels(api, "invalid").inc()
    metrics.finished(NO_TIER, 0.1, 0.01, 1.0)
    metrics.prompt_tokens.inc(100)
    metrics.output_tokens.inc(30)
    assert counts_of(metrics.exposition().decode(), Goal()) == Counts(2, 1, 100, 0, 30, 0, 1)
    with pytest.raises(ValueError, match="requests_running"):
        counts_of("nothing 1\n", Goal())


def test_what_kept_another_goal_says_nothing_of_ours() -> None:
    slo = Slo(1.0, 0.03)
    metrics = RouterMetrics(Tiers({"default": slo}))
    for ttft_s in (0.5, 1.5):
        metrics.finished(Tier("default", slo), ttft_s, 0.01, 2.0)
    page = metrics.exposition().decode()
    assert counts_of(page, Goal(1.0, 0.03)).within == 1
    assert math.isnan(counts_of(page, Goal(1.0, 0.05)).within)


def test_a_cluster_is_read_whether_it_has_keda_or_not(api: KubernetesApi, server: Server) -> None:
    cluster = cluster_of(api, "a=b")
    assert [each.name for each in cluster.pods] == ["a", "b"]
    assert cluster.pools == (Pool("d", ("decode", "default"), Role.DECODE, 2, "77"),)
    assert {path.rpartition("/")[2]: query.get("labelSelector") for path, query in server.asked} == {
        "pods": ["a=b"],
        "deployments": ["a=b"],
        "horizontalpodautoscalers": None,
        "scaledobjects": None,
    }
    scaled = {"metadata": {"name": "s"}, "spec": {"scaleTargetRef": {"name": "d"}}}
    server.objects["/apis/keda.sh/v1alpha1/namespaces/llm/scaledobjects"] = [scaled]
    assert cluster_of(api, "").pools[0].hands_off == "KEDA's ScaledObject s scales it"


def test_a_cluster_of_which_some_cannot_be_read_is_no_cluster(api: KubernetesApi, server: Server) -> None:
    server.token = "another"
    with pytest.raises(Unavailable, match="403"):
        cluster_of(api, "a=b")
