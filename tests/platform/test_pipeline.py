"""Prefill workers whose ranks are stages of a pipeline, on tiny models: all stages hand over to each decode worker.

Each stage is on a node of its own, as processes of `diptych up --nodes 2`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from next_layers import random_folder

from diptych.engine import Engine, SamplingParams
from diptych.v1 import bootstrap_pb2

Platform = Any
Start = Callable[..., Platform]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, *range(20 * first)] for first in range(12)]  # the longer ones are computed in chunks


@pytest.fixture
def start(start_platform: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("DIPTYCH_KV_CACHE_MIB", "4")
    monkeypatch.setenv("DIPTYCH_MAX_STEP_TOKENS", "64")

    def start(folder: Path, prefill: str, decode: str) -> Platform:
        worker_options = ("--prefill-options", prefill, "--decode-options", decode, "--nodes", "2")
        return start_platform(options=("--model", str(folder), "--threads", "1", *worker_options))

    return start


def tokens_of_one_process(engine: Engine) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate_batch(PROMPTS, GREEDY)]


def tokens(platform: Platform) -> list[tuple[int, ...]]:
    """Those of all prompts, whose KV arrives whole."""

    def complete(prompt: list[int]) -> tuple[int, ...]:
        answer = platform.complete(prompt, GREEDY.max_tokens, ignore_eos=True, return_token_ids=True)
        seen = answer["diptych"]
        assert seen["whole"], seen
        assert seen["prefill_kv_digest"] == seen["decode_kv_digest"]
        return tuple(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(complete, PROMPTS))


def update_weights(platform: Platform, model: Path) -> subprocess.CompletedProcess[str]:
    address = f"127.0.0.1:{platform.bootstrap_port}"
    command = [sys.executable, "-m", "diptych.cli", "update-weights", str(model), "--bootstrap", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def prefill_ranks(platform: Platform) -> list[psutil.Process]:
    """The scheduler processes of the prefill worker, rank 0 first."""
    nodes = sorted(platform.components("prefill"), key=lambda node: "--node-rank 1" in " ".join(node.cmdline()))
    return [rank for node in nodes for rank in node.children() if "diptych.unified.scheduler" in rank.cmdline()]


def prefill_instance(platform: Platform) -> Any:
    """The record of the instance that serves prefill; None while none is ready."""
    ready = [each for each in platform.instances() if each.state == bootstrap_pb2.INSTANCE_STATE_READY]
    return next((each for each in ready if each.role == bootstrap_pb2.ROLE_PREFILL), None)


def ready_prefill(platform: Platform) -> int:
    """The instance that serves prefill; 0 while none is ready."""
    found = prefill_instance(platform)
    return found.instance_id if found else 0


def test_stages_on_two_nodes_prefill_for_two_ranks_that_hold_all_and_end_together_when_one_dies(
    start: Start,
    tiny_folder: Path,
    tmp_path: Path,
    reference: Callable[..., Engine],
    wait_until: Callable[..., Any],
) -> None:
    """Latents, and behind them the layer that guesses, which the last stage has, to pages of another size."""
    folder = random_folder(tmp_path / "latent", "DeepseekV3", tiny_folder)
    prefill, decode = "--pp 2 --speculate mtp", "--tp 2 --page-size 8 --speculate mtp"
    platform, expected = start(folder, prefill, decode), tokens_of_one_process(reference(folder))
    for _ in range(2):  # the second time prefixes are cached on both sides
        assert tokens(platform) == expected
    refused = update_weights(platform, folder)
    assert refused.returncode == 1
    assert "stages of a pipeline (--pp) keep their weights: restart the worker" in refused.stderr
    platform.assert_clean()
    before, processes = ready_prefill(platform), prefill_ranks(platform)
    assert [(node.node, node.first_rank) for node in prefill_instance(platform).nodes] == [(0, 0), (1, 1)]
    assert len(processes) == 2
    processes[1].kill()
    wait_until(lambda: not any(process.is_running() for process in processes), 200.0, "the first stage has ended, too")
    wait_until(lambda: ready_prefill(platform) not in (0, before), 200.0, "the worker was started again")
    wait_until(platform.is_ready, 200.0, "the platform is routable again")
    assert tokens(platform) == expected
    platform.assert_clean()


@pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="tests/kvtransfer/test_stages.py shows the parts")
def test_two_stages_of_two_ranks_prefill_for_a_worker_of_two(
    start: Start, tiny_experts_folder: Path, reference: Callable[..., Engine]
) -> None:
    platform = start(tiny_experts_folder, "--pp 2 --tp 2", "--tp 2")
    assert tokens(platform) == tokens_of_one_process(reference(tiny_experts_folder))
    platform.assert_clean()
