"""A router learns from its sessions which pages workers have cached, and says whether it knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych.generation.leg_prompt import prompt_of
from diptych.v1.worker_pb2 import KvEvents

Cluster = Any


def known(cluster: Cluster) -> tuple[float, float]:
    """(pages, workers in sync) of the prefill role, as the metrics say."""
    lines = cluster.get("/metrics")[1].splitlines()
    names = ("diptych_router_cached_pages", "diptych_router_kv_in_sync")
    pages, in_sync = (
        float(line.split()[-1]) for name in names for line in lines if line.startswith(f'{name}{{role="prefill"}} ')
    )
    return pages, in_sync


def test_a_router_follows_the_cached_pages_of_a_worker(cluster: Cluster) -> None:
    assert known(cluster) == (0, 0)
    cluster.report_kv(cluster.prefill(), KvEvents(sequence=1, cleared=True, stored=[10, 11]))
    cluster.wait_until(lambda: known(cluster) == (2, 1))
    cluster.report_kv(cluster.prefill(), KvEvents(sequence=2, stored=[12, 13], removed=[11]))
    cluster.wait_until(lambda: known(cluster) == (3, 1))
    prefill_id = cluster.prefill().instance.instance_id
    assert cluster.router.fleet.prefixes.cached_tokens({1: [10, 12, 11]}) == {prefill_id: 2}


def test_after_a_gap_the_worker_is_asked_once_for_everything(cluster: Cluster) -> None:
    worker = cluster.prefill()
    cluster.report_kv(worker, KvEvents(sequence=1, cleared=True, stored=[10]))
    cluster.report_kv(worker, KvEvents(sequence=3, stored=[12]))
    cluster.report_kv(worker, KvEvents(sequence=4, stored=[13]))
    cluster.wait_for(lambda: worker.num_resyncs)
    assert known(cluster) == (0, 0)
    cluster.report_kv(worker, KvEvents(sequence=5, cleared=True, stored=[10, 11, 12, 13]))
    cluster.wait_until(lambda: known(cluster) == (4, 1))
    assert worker.num_resyncs == 1


def test_the_pages_of_a_lost_worker_are_forgotten(cluster: Cluster) -> None:
    cluster.report_kv(cluster.prefill(), KvEvents(sequence=1, cleared=True, stored=[10]))
    cluster.wait_until(lambda: known(cluster) == (1, 1))
    cluster.stop_worker(cluster.prefill())
    cluster.wait_until(lambda: known(cluster) == (0, 0))


def test_a_prompt_returns_to_the_worker_that_had_it_though_none_tells(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(prefill=3, policy="cache_aware")
    for worker in cluster.workers:
        worker.instance.transfer.layout.page_size = 4
    cluster.publish(*cluster.workers)
    for letter in "abcdeabcdeabcde":
        cluster.complete(letter * 400, max_tokens=2)
    families = [{int(prompt_of(leg)[0]) for leg in cluster.prefill(index).started} for index in range(3)]
    assert sorted(token_id for family in families for token_id in family) == cluster.tokenizer.encode("abcde")
