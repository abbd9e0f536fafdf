"""Two real workers with the small model, of which one speculates: the same tokens, and some of them guessed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from scheduler_pair import Leg, SchedulerPair

from diptych.checkpoints.source import open_model
from diptych.engine.options.config import EngineOptions
from diptych.engine.values.transfer_rules import TransferRules
from diptych.v1.worker_pb2 import Drafting, WorkerStatus

pytestmark = pytest.mark.integration

PLAIN = EngineOptions(model="smollm2", kv_cache_mib=64, max_step_tokens=128)
TEXTS = (
    "red apple, green pear, blue plum, red apple, green pear, blue plum, red apple, green",
    "one, two, three, four, one, two, three, four, one, two,",
)
NUM_TOKENS = 40


def tokens_of(legs: Sequence[tuple[Leg, Leg]]) -> list[list[int]]:
    return [first.token_ids + others.token_ids for first, others in legs]


def num_accepted(drafting: Drafting) -> int:
    return sum(sum(each.accepted) for each in drafting.sources)


def test_a_worker_that_speculates_pairs_with_one_that_does_not_and_gives_the_same_tokens() -> None:
    tokenizer = open_model("smollm2").tokenizer()
    prompts = [tokenizer.encode(text) for text in TEXTS]

    async def run() -> tuple[list[list[int]], list[list[int]], WorkerStatus, WorkerStatus]:
        """Decode where somebody speculates, and then the same where nobody does."""
        other = replace(PLAIN, speculate="suffix")
        async with SchedulerPair(PLAIN, TransferRules(), roles=("unified", "unified"), decode_engine=other) as pair:
            there = [await pair.request(room, each, NUM_TOKENS) for room, each in enumerate(prompts, 1)]
            back = [
                await pair.exchange(room, each, pair.decode, pair.prefill, NUM_TOKENS)
                for room, each in enumerate(prompts, 11)
            ]
            statuses = await pair.decode.ask_status(), await pair.prefill.ask_status()
            return tokens_of(there), tokens_of(back), *statuses

    guessed, plain, status, plain_status = asyncio.run(run())
    assert guessed == plain
    assert [len(tokens) for tokens in guessed] == [NUM_TOKENS] * len(TEXTS)
    assert num_accepted(status.drafting) >= NUM_TOKENS // 2
    assert not plain_status.HasField("drafting")
