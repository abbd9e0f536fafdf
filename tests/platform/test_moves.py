"""Outputs go on at another worker when theirs becomes too slow for them: real processes, real UCX, real pages."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.engine import Engine, EngineOptions, SamplingParams

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]

Platform = Any  # the fixture's class: test helpers can't be imported

PAGE = 16
NUM_PROMPTS = 6
NUM_TOKENS = 160
TIMING = "step=3000,prompt=5,request=0,context=15"  # microseconds: six contexts of 200 tokens take 18 ms more
TPOT_MS = 12.0
SESSION = {"x-diptych-session": "one", "x-diptych-timings": "1"}


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(320), k=70 + 9 * number)


@pytest.fixture(scope="module")
def answers(tiny_folder: Path) -> list[list[int]]:
    """What one process makes of each prompt."""
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(str(tiny_folder), EngineOptions(kv_cache_mib=4, device="sim", sim_timing=("none",))) as engine:
        return [list(engine.generate(prompt(number), greedy).token_ids) for number in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def platform(
    platform_class: type[Platform], tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """Two workers that do both, of which one gets all outputs of a session, and so becomes too slow for them."""
    started = platform_class(
        tmp_path_factory.mktemp("moves") / "log",
        prefill=0,
        decode=0,
        options=("--model", str(tiny_folder), "--unified", "2", "--device", "sim"),
        DIPTYCH_KV_CACHE_MIB="4",
        DIPTYCH_SIM_TIMING=TIMING,
        DIPTYCH_POLICY="consistent_hash",
        DIPTYCH_TTFT_SLO_MS="5000",
        DIPTYCH_TPOT_SLO_MS=str(TPOT_MS),
    )
    yield started
    started.stop()


def ask(platform: Platform, number: int) -> tuple[list[int], dict[str, Any]]:
    """Return the output and what its workers measured."""
    body = {"model": "", "prompt": prompt(number), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    status, answer = platform.post("/v1/completions", {**body, "return_token_ids": True}, headers=SESSION)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    return answer["choices"][0]["token_ids"], answer["diptych"]


def count(platform: Platform, name: str) -> int:
    """Return a counter of the router."""
    lines = [line for line in platform.metrics().splitlines() if line.startswith(f"diptych_router_{name}_total")]
    return sum(int(float(line.split()[-1])) for line in lines)


def test_outputs_that_become_too_slow_go_on_elsewhere_with_their_pages(
    platform: Platform, answers: list[list[int]], wait_for: Callable[..., Any]
) -> None:
    wait_for(lambda: num_linked(platform) == 2, 200.0, "links")
    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        given = list(pool.map(lambda number: ask(platform, number), range(NUM_PROMPTS)))
    assert [tokens for tokens, _ in given] == answers
    moved = [seen for _, seen in given if seen["prefill_instance"] != seen["decode_instance"]]
    assert 1 <= len(moved) < NUM_PROMPTS, "some of them: then the others are in time again"
    assert count(platform, "moves") == count(platform, "moves_begun") == len(moved)
    assert count(platform, "replays") == 0
    check_pages(platform, moved)
    platform.assert_clean()


def check_pages(platform: Platform, moved: list[dict[str, Any]]) -> None:
    """All KV of what moved was sent: the worker that took it has computed no token of a prompt."""
    assert all(seen["whole"] and seen["prefill_kv_digest"] == seen["decode_kv_digest"] for seen in moved)
    assert all(seen["pages_moved"] >= -(-70 // PAGE) for seen in moved)
    giver, taker = sorted(platform.statuses(), key=lambda status: status.pages_received)
    num_pages = sum(seen["pages_moved"] for seen in moved)
    assert (giver.pages_sent, giver.pages_received) == (num_pages, 0)
    assert (taker.pages_sent, taker.pages_received) == (0, num_pages)
    assert giver.prefill_s > 0
    assert taker.prefill_s == 0


def num_linked(platform: Platform) -> int:
    """Return how many workers have a link; 0 while one that was killed is a member still."""
    with contextlib.suppress(grpc.RpcError):
        return sum(len(each.instance.load.linked_instances) == 1 for each in platform.statuses())
    return 0
