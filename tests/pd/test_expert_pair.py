"""Two real workers of a model with experts: one process has all of them, two ranks have some whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from every_kind import prompt_of
from greedy_text import generate
from scheduler_pair import SchedulerPair

from diptych.engine.options.config import EngineOptions
from diptych.engine.values.transfer_rules import TransferRules

pytestmark = pytest.mark.integration

NUM_TOKENS = 20
ROOMS = range(1, 4)


def test_a_worker_whose_ranks_have_whole_experts_pairs_with_one_of_one_rank_either_way(
    tiny_experts_folder: Path,
) -> None:
    """Three experts on two ranks. Nothing about KV depends on where experts are."""
    one = EngineOptions(model=str(tiny_experts_folder), kv_cache_mib=4, page_size=256)
    dealt = replace(one, tp=2, expert_parallel=True)

    async def run() -> list[list[int]]:
        async with SchedulerPair(
            one, TransferRules("always"), roles=("unified", "unified"), decode_engine=dealt
        ) as pair:
            ways = ((0, pair.prefill, pair.decode), (10, pair.decode, pair.prefill))
            legs = [
                await pair.exchange(first + room, prompt_of(room), prefill, decode, NUM_TOKENS)
                for first, prefill, decode in ways
                for room in ROOMS
            ]
            return [first.token_ids + others.token_ids for first, others in legs]

    said = asyncio.run(run())
    assert said == 2 * [
        generate(tiny_experts_folder, prompt, num_tokens=NUM_TOKENS)[len(prompt) :] for prompt in map(prompt_of, ROOMS)
    ]
