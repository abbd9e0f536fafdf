"""Prefill and decode of two ranks each, on a tiny model: every rank moves its own part of the pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.engine import Engine, SamplingParams
from diptych.v1 import bootstrap_pb2

Platform = Any
DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="test_pipeline.py kills a rank of prefill")
PAGE = 16
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, *range(20 * first)] for first in range(16)]


@pytest.fixture(scope="module")
def platform(start_shared: Callable[..., Platform], tiny_folder: Path) -> Platform:
    variables = {"DIPTYCH_TP": "2", "DIPTYCH_KV_CACHE_MIB": "4", "DIPTYCH_MAX_STEP_TOKENS": "64"}
    return start_shared(options=("--model", str(tiny_folder), "--threads", "1"), **variables)


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, reference: Callable[..., Engine]) -> list[tuple[int, ...]]:
    """One process, one rank."""
    return [each.token_ids for each in reference(tiny_folder).generate_batch(PROMPTS, GREEDY)]


def complete_all(platform: Platform) -> list[Any]:
    def complete(prompt: list[int]) -> Any:
        return platform.complete(prompt, GREEDY.max_tokens, ignore_eos=True, return_token_ids=True)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(complete, PROMPTS))


def output_ids(answer: Any) -> tuple[int, ...]:
    return tuple(answer["choices"][0]["token_ids"])


def ranks(platform: Platform, role: str) -> list[psutil.Process]:
    """The scheduler processes of the worker of a role, rank 0 first."""
    (worker,) = platform.components(role)
    return [child for child in worker.children() if "diptych.unified.scheduler" in child.cmdline()]


def test_two_ranks_on_both_sides_give_the_tokens_of_one_and_move_every_page(
    platform: Platform, expected: list[tuple[int, ...]]
) -> None:
    assert [len(ranks(platform, role)) for role in ("prefill", "decode")] == [2, 2]
    moved = 0
    for _ in range(2):
        answers = complete_all(platform)
        assert [output_ids(answer) for answer in answers] == expected
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            seen = answer["diptych"]
            wanted = -(-len(prompt) // PAGE) - seen["decode_cached_tokens"] // PAGE
            assert seen["prefill_pages_moved"] == seen["pages_moved"] == wanted >= 1
            assert seen["whole"], seen
            assert seen["prefill_kv_digest"] == seen["decode_kv_digest"]
            moved += wanted
    platform.assert_clean()
    statuses = platform.statuses()
    assert (sum(s.pages_sent for s in statuses), sum(s.pages_received for s in statuses)) == (moved, moved)


def instance(platform: Platform, role: int) -> int:
    """The instance that serves a role; 0 while none is ready."""
    ready = [each for each in platform.instances() if each.state == bootstrap_pb2.INSTANCE_STATE_READY]
    return next((each.instance_id for each in ready if each.role == role), 0)


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=DEEP), "decode"])
def test_a_dead_rank_ends_its_worker_whose_successor_serves(
    platform: Platform, expected: list[tuple[int, ...]], role: str, wait_until: Callable[..., Any]
) -> None:
    number = {"prefill": bootstrap_pb2.ROLE_PREFILL, "decode": bootstrap_pb2.ROLE_DECODE}[role]
    before, processes = instance(platform, number), ranks(platform, role)
    processes[1].kill()
    wait_until(lambda: not any(process.is_running() for process in processes), 200.0, "the other rank has ended, too")
    wait_until(lambda: instance(platform, number) not in (0, before), 200.0, "the worker was started again")
    wait_until(platform.is_ready, 200.0, "the platform is routable again")
    assert [output_ids(answer) for answer in complete_all(platform)] == expected
    platform.assert_clean()
