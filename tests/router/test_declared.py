"""What is declared becomes so: adapters on workers that join later, and pools that stand beside each other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych.generation.sampling_params import SamplingParams
from diptych.router.values.request import ClientRequest, GenerationRequest, Routing, TextPrompt, Tokenized
from diptych.v1 import bootstrap_pb2, worker_pb2

Cluster = Any
DECODE = bootstrap_pb2.ROLE_DECODE
READY = bootstrap_pb2.INSTANCE_STATE_READY


def write(path: Path, text: str) -> None:
    """As Kubernetes does it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def declare(cluster: Cluster, text: str) -> tuple[int, Any]:
    status, answer = cluster.post("/admin/declared", text.encode())
    return status, answer


def in_pools(cluster: Cluster) -> None:
    """Have the first worker of each role in pool `old`, the other one in `next`."""
    for index, worker in enumerate(cluster.workers):
        worker.instance.pool = ("old", "next")[index % 2]
    cluster.publish(*cluster.workers)
    cluster.wait_until(lambda: len(cluster.router.fleet.pairs()) == 4)


def served(cluster: Cluster) -> list[int]:
    """Return how many legs each worker has got since last asked."""
    counts = [len(worker.started) for worker in cluster.workers]
    for worker in cluster.workers:
        worker.started.clear()
    return counts


@pytest.fixture
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster(prefill=2, decode=2)


def test_a_canary_gets_what_names_it_then_its_part_then_all_and_no_request_is_lost(cluster: Cluster) -> None:
    in_pools(cluster)
    status, answer = declare(cluster, "[pools]\nold = 1\nnext = 0")
    assert (status, answer["changes"]) == (200, ["pool next: weight 0", "pool old: weight 1"])
    assert len(cluster.router.fleet.pairs()) == 2, "revisions never meet"
    answers = [cluster.post("/v1/completions", {"prompt": "p"})[0] for _ in range(6)]
    assert served(cluster) == [6, 0, 6, 0]
    answers += [cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-pool": "next"})[0] for _ in range(3)]
    assert served(cluster) == [0, 3, 0, 3]
    declare(cluster, "[pools]\nold = 1\nnext = 1")
    answers += [cluster.post("/v1/completions", {"prompt": "p"})[0] for _ in range(40)]
    old, new, *_ = served(cluster)
    assert (old + new, old > 5, new > 5) == (40, True, True)
    declare(cluster, "[pools]\nold = 0\nnext = 1")
    answers += [cluster.post("/v1/completions", {"prompt": "p"})[0] for _ in range(6)]
    assert served(cluster) == [0, 6, 0, 6]
    assert set(answers) == {200}
    page = cluster.get("/metrics")[1]
    assert 'diptych_router_declared_pool_attempts_total{pool="next"}' in page


def test_a_session_stays_in_its_pool(cluster: Cluster) -> None:
    in_pools(cluster)
    declare(cluster, "[pools]\nold = 1\nnext = 1")
    for _ in range(6):
        assert cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-session": "s"})[0] == 200
    assert sorted(served(cluster)[:2]) == [0, 6]


def test_what_a_canary_fails_the_other_pool_serves(cluster: Cluster, fail: Callable[..., Any]) -> None:
    in_pools(cluster)
    declare(cluster, "[pools]\nold = 1\nnext = 1000000")
    for worker in cluster.workers[1::2]:
        worker.faults = [fail(0, worker_pb2.ERROR_CODE_TRANSFER_FAILED)] * 9
    answers = [cluster.post("/v1/completions", {"prompt": "p"})[0] for _ in range(3)]
    assert answers == [200] * 3
    assert served(cluster)[0] == 3
    page = cluster.get("/metrics")[1]
    assert 'diptych_router_declared_pool_failures_total{pool="next"}' in page


def test_a_pool_without_a_pair_gives_its_part_to_others_unless_it_is_named(cluster: Cluster) -> None:
    in_pools(cluster)
    declare(cluster, "[pools]\nold = 1\nnext = 1")
    cluster.publish(cluster.workers[0], cluster.workers[2])
    cluster.wait_until(lambda: len(cluster.router.fleet.pairs()) == 1)
    assert {cluster.post("/v1/completions", {"prompt": "p"})[0] for _ in range(9)} == {200}
    status, answer = cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-pool": "next"})
    assert (status, "pool 'next'" in answer["error"]["message"]) == (503, True)


def test_a_pool_that_is_not_declared_is_refused_by_name(cluster: Cluster) -> None:
    status, answer = cluster.post("/v1/completions", {"prompt": "p"}, {"x-diptych-pool": "next"})
    assert (status, answer["error"]["message"]) == (400, "no pool 'next' is declared; there is: none")


def test_declared_adapters_are_loaded_also_on_a_worker_that_joins_later(
    start_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    path = tmp_path / "declared.toml"
    path.write_text('[adapters]\nsql = "/a/sql"')
    cluster = start_cluster(declared_file=path)
    cluster.wait_until(lambda: cluster.router.fleet.adapters() == ("sql",))
    late = cluster.add_worker(150, DECODE)
    cluster.publish(*cluster.workers)
    cluster.wait_until(lambda: [each.name for each in late.instance.loras] == ["sql"])
    write(path, '[adapters]\nchat = "/a/chat"')
    cluster.wait_until(lambda: cluster.router.fleet.adapters() == ("chat",))
    status, answer = declare(cluster, "")
    assert (status, "change the file instead" in answer["error"]) == (400, True)
    assert json.loads(cluster.get("/admin/declared")[1])["adapters"] == {"chat": "/a/chat"}


def test_doing_it_again_changes_nothing_and_nonsense_is_refused(cluster: Cluster) -> None:
    text = 'log_level = "info"\n[adapters]\nsql = "/a/sql"'
    assert declare(cluster, text)[1]["changes"] == ["adapter sql: /a/sql", "log level: info"]
    assert declare(cluster, text)[1] == {
        "adapters": {"sql": "/a/sql"},
        "pools": {},
        "log_level": "info",
        "problems": {},
        "changes": [],
    }
    status, answer = declare(cluster, "[pools]\na = -1")
    assert (status, answer["error"]) == (400, "the body: pools.a is a weight from 0 on, not -1")


def test_a_router_that_starts_later_takes_over_the_newest_of_the_others(cluster: Cluster) -> None:
    in_pools(cluster)
    declare(cluster, "[pools]\nold = 1\nnext = 0")
    declare(cluster, "[pools]\nold = 1\nnext = 3")
    version = cluster.router.reconciler.version
    assert version == (2, "[pools]\nold = 1\nnext = 3")
    other = bootstrap_pb2.Instance(instance_id=8, role=bootstrap_pb2.ROLE_ROUTER, address="r:1", state=READY)
    for number, weights, holds in ((1, "old = 9", 3.0), (3, "old = 1\nnext = 7", 7.0)):
        other.declared_version, other.declared = number, f"[pools]\n{weights}"
        cluster.call(publish_beside(cluster, other))
        cluster.wait_until(lambda holds=holds: cluster.router.fleet.pools.get("next") == holds)
    assert cluster.router.reconciler.version.number == 3
    assert declare(cluster, "[pools]\nold = 1")[0] == 200
    assert cluster.router.reconciler.version.number == 4, "above all that are known"


async def publish_beside(cluster: Cluster, router: bootstrap_pb2.Instance) -> None:
    cluster._members[router.instance_id] = bootstrap_pb2.Instance()
    cluster._members[router.instance_id].CopyFrom(router)
    for listener in cluster._listeners:
        listener()


def test_a_pool_of_weight_0_serves_no_wait_and_no_second_attempt_of_others(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster(prefill=2, decode=2, pair_wait_s=0.3)
    in_pools(cluster)
    declare(cluster, "[pools]\nold = 1\nnext = 0")
    selector, old = cluster.router.dispatcher.selector, {cluster.workers[i].instance.instance_id for i in (0, 2)}
    assert [selector.has_fresh_pair(asked(pool), old) for pool in ("", "old", "next")] == [False, False, True]
    cluster.publish(*cluster.workers[1::2])
    cluster.wait_until(lambda: len(cluster.router.fleet.pairs()) == 1)
    begun_s = time.monotonic()
    status, answer = cluster.post("/v1/completions", {"prompt": "p"})
    assert (status, "weight above 0" in answer["error"]["message"]) == (503, True)
    assert time.monotonic() - begun_s >= 0.3


def asked(pool: str) -> GenerationRequest:
    client = ClientRequest("", [TextPrompt("p")], SamplingParams(), routing=Routing(pool=pool))
    return GenerationRequest(client, Tokenized([1]), SamplingParams(), 1.0)
