"""What the console is drawn of, counted by a real router in front of simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from diptych.router.choose.cached_prefixes import CachedPrefixes
from diptych.router.console.cache.cache_state import CacheView
from diptych.router.console.history import INTERVAL_S, History
from diptych.router.console.pieces import at_once
from diptych.v1.worker_pb2 import ERROR_CODE_RETRACTED

Cluster = Any
BEGUN_S = 1_800_000_000.0
PAGE_SIZE = 4


@pytest.fixture
def start(start_cluster: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """Start a router whose workers have small pages."""

    def start(**options: Any) -> Cluster:
        cluster = start_cluster(prefill=2, **{"policy": "pair_cost", **options})
        for worker in cluster.workers:
            worker.instance.transfer.layout.page_size = PAGE_SIZE
        cluster.publish(*cluster.workers)
        return cluster

    return start


def history_of(cluster: Cluster) -> History:
    router = cluster.router
    history = History(router.dispatcher.metrics.served, router.serving.shared.admission, router.fleet.pool_members)
    at_once(history.sample(BEGUN_S))
    return history


def caches_of(cluster: Cluster, history: History) -> CacheView:
    prefixes: CachedPrefixes = cluster.router.fleet.prefixes
    return CacheView(cluster.router.dispatcher.selector.seen, history, prefixes, lambda: [])


def newest(history: History, name: str) -> float | None:
    return at_once(history.charts())["series"][name]["values"][-1]


def now_s(cluster: Cluster) -> float:
    return float(cluster.router.dispatcher.selector.seen.since(0)[-1].seen_s)


def infinite_cache(prompts: Sequence[str]) -> float:
    """The share of tokens, one a byte, that a cache which forgets nothing has of prompts, one after the other."""
    known: set[str] = set()
    found = 0
    for prompt in prompts:
        pages = [prompt[:end] for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE)]
        found += PAGE_SIZE * sum(page in known for page in pages)
        known.update(pages)
    return found / sum(map(len, prompts))


def test_the_ceiling_and_the_hottest_prefix_are_those_of_the_prompts_that_came(start: Callable[..., Cluster]) -> None:
    cluster = start()
    history = history_of(cluster)
    prompts = [("system " * 8)[: 40 + number] + f" and {number}" for number in range(12)] * 2
    for prompt in prompts:
        cluster.complete(prompt, max_tokens=2)
    at_once(history.sample(BEGUN_S + INTERVAL_S))
    state = at_once(caches_of(cluster, history).state(now_s(cluster)))
    assert state["ceiling"] == pytest.approx(infinite_cache(prompts), abs=0.01)
    assert state["prompt_tokens"] == sum(map(len, prompts))
    assert state["hit_rate"] == pytest.approx(state["cached_tokens"] / state["prompt_tokens"])
    hottest = next(iter(state["prefixes"].values()))
    assert (hottest["num_tokens"], hottest["num_requests"]) == (40, 24)
    assert set(hottest["workers"]) <= {f"{worker.instance.instance_id:016x}" for worker in cluster.workers}
    assert hottest["workers"]


@pytest.mark.parametrize("options", [{"policy": "least_load"}, {"tokenize_at": "worker"}])
def test_where_no_prompt_is_read_nothing_is_said_of_an_infinite_cache(
    start: Callable[..., Cluster], options: dict[str, Any]
) -> None:
    cluster = start(**options)
    history = history_of(cluster)
    cluster.complete("the same" * 9, max_tokens=2)
    cluster.complete("the same" * 9, max_tokens=2)
    at_once(history.sample(BEGUN_S + INTERVAL_S))
    state = at_once(caches_of(cluster, history).state(0.0))
    assert (state["ceiling"], state["prefixes"]) == (None, {})
    assert state["hit_rate"] is not None


def test_a_prompt_is_seen_once_however_often_it_is_tried(start: Callable[..., Cluster], fail: Any) -> None:
    cluster = start(pair_wait_s=1.5)
    cluster.prefill().faults.append(fail(0, ERROR_CODE_RETRACTED))
    cluster.prefill(1).faults.append(fail(0, ERROR_CODE_RETRACTED))
    cluster.complete("once and for all", max_tokens=2)
    assert sum(len(worker.started) for worker in cluster.workers) > 2
    seen = cluster.router.dispatcher.selector.seen
    assert [each.num_tokens for each in seen.since(0)] == [16]


@pytest.mark.parametrize(("options", "good"), [({}, 1.0), ({"ttft_slo_ms": 1e5}, 1.0), ({"ttft_slo_ms": 0.1}, 0.0)])
def test_charts_show_what_was_served(start: Callable[..., Cluster], options: dict[str, Any], good: float) -> None:
    cluster = start(**options)
    history = history_of(cluster)
    for _ in range(5):
        cluster.complete("a prompt", max_tokens=4)
    assert cluster.post("/v1/completions", {"prompt": []})[0] == 400
    at_once(history.sample(BEGUN_S + INTERVAL_S))
    assert newest(history, "goodput") == good
    assert newest(history, "requests") == 6 / INTERVAL_S
    assert newest(history, "errors") == 0
    assert newest(history, "prompt_tokens") == 5 * len("a prompt") / INTERVAL_S
    assert newest(history, "output_tokens") == 5 * 4 / INTERVAL_S
    assert newest(history, "ttft_p95") is not None
    assert (newest(history, "running"), newest(history, "queued")) == (0, 0)
    assert newest(history, "queue_prefill") == 0
