"""What workers say of their KV credit reaches the choice of a pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Cluster = Any
NUM_REQUESTS = 6


def test_requests_go_where_there_is_kv_credit(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(decode=2)
    full, free = cluster.decode(0), cluster.decode(1)
    full.instance.load.grantable_pages = 0
    cluster.publish(*cluster.workers)
    for _ in range(NUM_REQUESTS):
        cluster.complete()
    assert (len(full.started), len(free.started)) == (0, NUM_REQUESTS)


def test_without_credit_anywhere_requests_are_spread(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(decode=2)
    for _ in range(NUM_REQUESTS):
        cluster.complete()
    assert [len(cluster.decode(number).started) for number in (0, 1)] == [NUM_REQUESTS // 2] * 2


def test_what_a_worker_says_of_its_links_is_kept_with_its_load(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    prefill, peer = cluster.prefill(), cluster.decode().instance.instance_id
    prefill.instance.load.queued_transfer_bytes = 4096
    prefill.instance.load.link_speeds.add(peer_instance_id=peer, bytes_per_s=2e9)
    cluster.publish(*cluster.workers)
    load = cluster.router.fleet.session(prefill.instance.instance_id).load()
    assert (load.queued_transfer_bytes, dict(load.link_speeds)) == (4096, {peer: 2e9})
