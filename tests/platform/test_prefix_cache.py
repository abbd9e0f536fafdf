"""The prefix caches of a running platform: what goes to host memory comes back, and the router knows what is cached."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diptych.v1 import bootstrap_pb2

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

PAGE = 16
Platform = Any  # the fixture's class: test helpers can't be imported


def prompt(number: int) -> list[int]:
    """25 pages that no other number shares."""
    return [(number * 37 + position * 11) % 300 for position in range(25 * PAGE + 1)]


def metric(platform: Platform, name: str, role: str) -> float:
    with urllib.request.urlopen(f"{platform.url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{role="{role}"}}'))


def cached_pages(platform: Platform, role: bootstrap_pb2.Role) -> int:
    """How many pages the worker of a role has cached, in both tiers, as it says itself."""
    (status,) = [status for status in platform.statuses() if status.instance.role == role]
    return int(status.pages_by_state["cached"] + status.host_pages)


def router_knows(platform: Platform, role: bootstrap_pb2.Role, name: str) -> bool:
    return metric(platform, "diptych_router_cached_pages", name) == cached_pages(platform, role)


@pytest.fixture
def small(start_platform: Callable[..., Platform], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """Pools of 127 pages, and as many in host memory."""
    monkeypatch.setenv("DIPTYCH_KV_CACHE_MIB", "1")
    monkeypatch.setenv("DIPTYCH_HOST_CACHE_MIB", "1")
    return start_platform(options=("--model", str(tiny_folder)))


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
        assert metric(small, "diptych_router_kv_in_sync", name) == 1
        wait_for(partial(router_knows, small, role, name), 5.0, "the router knows all pages")
