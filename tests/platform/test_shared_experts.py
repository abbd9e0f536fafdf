"""Decode workers whose two schedulers share experts, behind a prefill worker of one process: they serve, end and drain
as one.
"""

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
DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="the other one's death shows the same")
MOVING = "--rebalance-experts 40 --redundant-experts 2"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, *range(20 * first)] for first in range(8)]


@pytest.fixture(scope="module")
def platform(start_shared: Callable[..., Platform], tiny_latent_experts_folder: Path) -> Platform:
    model = ("--model", str(tiny_latent_experts_folder), "--threads", "1")
    options = (*model, "--decode-options", f"--dp 2 --dp-attention --overlap-batches 3 {MOVING}")
    variables = {"DIPTYCH_KV_CACHE_MIB": "4", "DIPTYCH_MAX_STEP_TOKENS": "64", "DIPTYCH_POLICY": "least_load"}
    return start_shared(decode=2, options=options, **variables)


@pytest.fixture(scope="module")
def expected(tiny_latent_experts_folder: Path, reference: Callable[..., Engine]) -> list[tuple[int, ...]]:
    """One process has everything."""
    return [each.token_ids for each in reference(tiny_latent_experts_folder).generate_batch(PROMPTS, GREEDY)]


def complete_all(platform: Platform) -> list[tuple[int, ...]]:
    def complete(prompt: list[int]) -> tuple[int, ...]:
        answer = platform.complete(prompt, GREEDY.max_tokens, ignore_eos=True, return_token_ids=True)
        return tuple(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(complete, PROMPTS))


def schedulers(worker: psutil.Process) -> list[psutil.Process]:
    return [child for child in worker.children() if "diptych.unified.scheduler" in child.cmdline()]


def ready_decoders(platform: Platform) -> list[bootstrap_pb2.Instance]:
    ready = [each for each in platform.instances() if each.state == bootstrap_pb2.INSTANCE_STATE_READY]
    return [each for each in ready if each.role == bootstrap_pb2.ROLE_DECODE]


def test_schedulers_that_share_experts_decode_for_one_that_has_them_all(
    platform: Platform, expected: list[tuple[int, ...]]
) -> None:
    assert sorted(each.dp_rank for each in ready_decoders(platform)) == [0, 0, 1, 1]
    for _ in range(2):
        assert complete_all(platform) == expected
    platform.assert_clean()
    received = [each.pages_received for each in platform.statuses() if each.pages_received]
    assert len(received) == 4, "each has KV of its own"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=DEEP)])
def test_the_death_of_one_ends_all_that_share_its_experts_and_no_request(
    platform: Platform, expected: list[tuple[int, ...]], victim: int, wait_until: Callable[..., Any]
) -> None:
    worker = platform.components("decode")[victim]
    ours, before = schedulers(worker), {each.instance_id for each in ready_decoders(platform)}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [complete_all(platform) for _ in range(3)])
        ours[victim].kill()
        assert running.result() == [expected] * 3
    wait_until(lambda: not any(each.is_running() for each in ours), 200.0, "the other scheduler has ended, too")
    wait_until(
        lambda: (
            len(ready_decoders(platform)) == 4 and len({e.instance_id for e in ready_decoders(platform)} - before) == 2
        ),
        200.0,
        "the worker was started again",
    )
    platform.assert_clean()


def test_a_worker_that_drains_goes_on_stepping_for_its_last_request(
    platform: Platform, expected: list[tuple[int, ...]], wait_until: Callable[..., Any]
) -> None:
    worker = platform.components("decode")[0]
    ours = schedulers(worker)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [complete_all(platform) for _ in range(3)])
        worker.terminate()
        assert running.result() == [expected] * 3
    wait_until(lambda: not any(each.is_running() for each in ours), 200.0, "the worker has ended")
    platform.assert_clean()
