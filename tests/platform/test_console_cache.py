"""What the console says of caches and charts of a platform whose prompts are known, beside what is counted here."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from diptych.common.members.roles import WORKER_ROLES

Platform = Any  # the fixture's class: test helpers can't be imported
PAGE_SIZE = 16
SYSTEM = list(range(100, 228))  # 8 pages
PROMPTS = [SYSTEM[: 64 + 16 * (number % 5)] + [number] * (20 + number) for number in range(24)]


def document(platform: Platform, name: str) -> Any:
    request = urllib.request.Request(f"{platform.url}/console/api/{name}", headers=dict(platform.trust().metadata()))
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)


def infinite_cache(prompts: Sequence[Sequence[int]]) -> float:
    """The share of tokens that a cache which forgets nothing has of prompts, one after the other."""
    known: set[tuple[int, ...]] = set()
    found = 0
    for prompt in prompts:
        pages = [tuple(prompt[:end]) for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE)]
        found += PAGE_SIZE * sum(page in known for page in pages)
        known.update(pages)
    return found / sum(map(len, prompts))


def test_the_console_says_what_the_cache_did_and_what_it_could_have_done(
    simulated: Platform, wait_until: Callable[..., Any]
) -> None:
    answers = [simulated.complete(prompt, 4) for prompt in PROMPTS]
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    total = sum(map(len, PROMPTS))

    workers = {f"{each.instance_id:016x}" for each in simulated.instances() if each.role in WORKER_ROLES}

    def told() -> Any:
        state = document(simulated, "cache")
        if state["prompt_tokens"] != total or not state["tiers"]:
            return None
        is_all = state["tiers"]["pool"]["pages"] == sum(each.pages_by_state["cached"] for each in simulated.statuses())
        return state if is_all and set(next(iter(state["prefixes"].values()))["workers"]) == workers else None

    state = wait_until(told, 200.0, "the last interval is over, and both sides of the pair have told of all pages")
    assert state["cached_tokens"] == cached
    assert state["hit_rate"] == pytest.approx(cached / total)
    assert state["ceiling"] == pytest.approx(infinite_cache(PROMPTS), abs=0.01)
    assert state["hit_rate"] == pytest.approx(state["ceiling"], abs=0.01), "nothing was evicted: it did all it could"
    hottest = next(iter(state["prefixes"].values()))
    assert (hottest["num_tokens"], hottest["num_requests"], hottest["text"]) == (64, 24, "")
    assert state["tiers"]["pool"]["capacity_pages"] == sum(
        each.instance.load.total_pages or 0 for each in simulated.statuses()
    )


def test_charts_show_the_requests_that_were_served(simulated: Platform, wait_until: Callable[..., Any]) -> None:
    for number in range(10):
        simulated.complete([number] * 40, 4)

    def told() -> Any:
        charts = document(simulated, "charts")
        return charts if sum(charts["series"]["requests"]["values"]) * charts["interval_s"] >= 10 else None

    series = wait_until(told, 200.0, "the interval is over")["series"]
    assert {value for value in series["goodput"]["values"] if value is not None} == {1.0}
    for name in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95"):
        assert any(value is not None and 0 < value < 10 for value in series[name]["values"]), name
    assert {"kv_prefill", "kv_decode", "queue_prefill"} <= series.keys()
