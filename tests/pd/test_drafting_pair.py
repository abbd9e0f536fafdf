"""Two real workers whose model guesses for itself, of which one has two ranks: the same tokens as without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from every_kind import prompt_of
from scheduler_pair import Leg, SchedulerPair

from diptych.engine.options.config import EngineOptions
from diptych.engine.values.transfer_rules import TransferRules
from diptych.v1.worker_pb2 import WorkerStatus

NUM_TOKENS = 60
ROOMS = range(1, 5)


def tokens_of(legs: Sequence[tuple[Leg, Leg]]) -> list[list[int]]:
    return [first.token_ids + others.token_ids for first, others in legs]


def test_workers_with_draft_layers_pair_and_give_the_same_tokens_either_way(tiny_folder: Path) -> None:
    """Pages go from one rank to two, and back."""
    plain = EngineOptions(model=str(tiny_folder), kv_cache_mib=16, max_step_tokens=128)
    drafting = replace(plain, speculate=f"draft:{tiny_folder}")
    rules = TransferRules(integrity="always")

    async def run(engine: EngineOptions, other: EngineOptions) -> tuple[list[list[int]], list[WorkerStatus]]:
        async with SchedulerPair(engine, rules, roles=("unified", "unified"), decode_engine=other) as pair:
            there = [await pair.request(room, prompt_of(room), NUM_TOKENS) for room in ROOMS]
            back = [
                await pair.exchange(10 + room, prompt_of(room), pair.decode, pair.prefill, NUM_TOKENS) for room in ROOMS
            ]
            return tokens_of(there) + tokens_of(back), [await each.ask_status() for each in (pair.decode, pair.prefill)]

    guessed, statuses = asyncio.run(run(drafting, replace(drafting, tp=2)))
    expected, _ = asyncio.run(run(plain, plain))
    assert guessed == expected
    for status in statuses:
        [counts] = [each for each in status.drafting.sources if each.source == "draft"]
        assert sum(counts.verified) >= sum(counts.accepted) > 0
