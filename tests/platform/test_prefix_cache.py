"""The prefix caches of a running platform: what goes to host memory comes back, and the router knows what is cached."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import TrustConfig
from diptych.v1 import bootstrap_pb2, worker_pb2, worker_pb2_grpc

PAGE = 16
Platform = Any  # the fixture's class: test helpers can't be imported


def prompt(number: int) -> list[int]:
    """25 pages that no other number shares."""
    return [(number * 37 + position * 11) % 300 for position in range(25 * PAGE + 1)]


def metric(platform: Platform, name: str, role: str) -> float:
    lines = platform.metrics().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{role="{role}"}}'))


def cached_pages(platform: Platform, role: bootstrap_pb2.Role) -> int:
    """How many pages the worker of a role has cached, in both tiers, as it says itself."""
    (status,) = [status for status in platform.statuses() if status.instance.role == role]
    return int(status.pages_by_state["cached"] + status.host_pages)


def router_knows(platform: Platform, role: bootstrap_pb2.Role, name: str) -> bool:
    is_in_sync = metric(platform, "diptych_router_kv_in_sync", name) == 1
    return is_in_sync and metric(platform, "diptych_router_cached_pages", name) == cached_pages(platform, role)


@pytest.fixture(scope="module")
def small(start_shared: Callable[..., Platform], tiny_folder: Path) -> Platform:
    """Pools of 127 pages, and as many in host memory."""
    sizes = {"DIPTYCH_KV_CACHE_MIB": "1", "DIPTYCH_HOST_CACHE_MIB": "1"}
    return start_shared(options=("--model", str(tiny_folder)), **sizes)


def test_a_session_that_missed_something_is_told_all_pages_again(small: Platform) -> None:
    small.complete(prompt(1))
    small.assert_clean()  # prefill has cached the prompt
    prefill = next(i for i in small.instances() if i.role == bootstrap_pb2.ROLE_PREFILL)
    to_send: queue.SimpleQueue[worker_pb2.RouterBatch | None] = queue.SimpleQueue()
    with open_sync_channel(prefill.address, TrustConfig().trust()) as channel:
        batches = worker_pb2_grpc.WorkerStub(channel).Session(iter(to_send.get, None), timeout=200)
        events = (batch.kv_events for batch in batches if batch.HasField("kv_events"))
        first = next(events)
        assert (first.sequence, first.cleared, first.more, len(first.stored)) == (1, True, False, 25)
        to_send.put(worker_pb2.RouterBatch(resync_kv=True))
        again = next(events)
        assert (again.sequence, again.cleared, list(again.stored)) == (2, True, list(first.stored))
        to_send.put(None)
        assert list(batches) == []


def test_evicted_prefixes_come_back_from_host_memory_and_the_router_follows(
    small: Platform, wait_for: Callable[..., Any]
) -> None:
    first = [small.complete(prompt(number), ignore_eos=True)["choices"][0]["text"] for number in range(8)]
    again = [small.complete(prompt(number), ignore_eos=True) for number in range(8)]
    assert [answer["choices"][0]["text"] for answer in again] == first
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again] == [25 * PAGE] * 8
    for status in small.statuses():
        assert status.host_pages_saved >= status.host_pages_restored > 0
    small.assert_clean()
    for role, name in ((bootstrap_pb2.ROLE_PREFILL, "prefill"), (bootstrap_pb2.ROLE_DECODE, "decode")):
        wait_for(partial(router_knows, small, role, name), 200.0, "the router knows all pages")

    pages_sent = sum(status.pages_sent for status in small.statuses())
    choices = small.complete(prompt(20), n=8, max_tokens=2)["choices"]
    assert [choice["text"] for choice in choices] == [choices[0]["text"]] * 8
    small.assert_clean()
    assert sum(status.pages_sent for status in small.statuses()) <= pages_sent + 26 + 8  # the prompt's, once
