"""Schedulers that share experts on two GPUs: the bits of one GPU that adds up in the same order, and its tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from two_gpus import needs_two_gpus

from diptych.engine import Engine, EngineOptions, SamplingParams

pytestmark = pytest.mark.integration

SCRIPT: Final = Path(__file__).with_name("share_with_peers.py")
ONE: Final = EngineOptions(device="cuda", dtype="float32", kv_cache_mib=64, max_step_tokens=64, max_requests=16)
BY_NCCL: Final = {"peer_exchange": "off"}
HALVES: Final = BY_NCCL | {"overlap_batches": 2}
PROMPTS: Final = [[first, 5, 7, *range(9 * first)] for first in range(11)]


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("num_redundant", [0, 5])
def test_a_layer_has_the_bits_of_one_gpu_launched_and_replayed_with_late_ranks(
    num_redundant: int, tmp_path: Path
) -> None:
    given = "2", str(tmp_path), str(num_redundant)
    commands = [(sys.executable, str(SCRIPT), str(rank), *given) for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [json.loads(output) for output in outputs] == [{}, {}]


def tokens(folder: Path, options: EngineOptions) -> list[tuple[int, ...]]:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with Engine(str(folder), options, dispatch="round_robin") as engine:
        alone = [engine.generate(PROMPTS[-1], greedy).token_ids]  # the other one is idle
        return alone + [each.token_ids for each in engine.generate_batch(PROMPTS, greedy)]


@pytest.mark.gpu
@pytest.mark.timeout(600)  # kernels are compiled
@needs_two_gpus
@pytest.mark.parametrize("shared", [{}, {"cuda_graphs": "off"}, {"rebalance_experts": 5}, BY_NCCL, HALVES])
def test_schedulers_of_two_gpus_give_the_tokens_of_one(
    tiny_latent_experts_folder: Path, shared: dict[str, object]
) -> None:
    options = replace(ONE, dp=2, dp_attention=True, **shared)  # type: ignore[arg-type]
    assert tokens(tiny_latent_experts_folder, options) == tokens(tiny_latent_experts_folder, ONE)
