"""Two real workers whose model guesses for itself, of which one has two ranks: the same tokens as without."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import eagle_heads
import pytest
import sure_next_layer
from every_kind import prompt_of
from greedy_text import generate
from scheduler_pair import SchedulerPair

from diptych.engine.options.config import EngineOptions
from diptych.engine.values.transfer_rules import TransferRules
from diptych.v1.worker_pb2 import WorkerStatus

pytestmark = pytest.mark.integration

NUM_TOKENS = 60
ROOMS = range(1, 5)
RULES = TransferRules(integrity="always", num_windows=2)  # the model's layers, and those of its draft


def test_workers_with_draft_layers_pair_and_give_the_same_tokens_either_way(tiny_folder: Path) -> None:
    """Pages go from one rank to two, and back, behind the layers that fill them."""
    one = EngineOptions(
        model=str(tiny_folder), kv_cache_mib=16, max_step_tokens=128, page_size=256, speculate=f"draft:{tiny_folder}"
    )

    async def run() -> tuple[list[list[int]], list[WorkerStatus]]:
        async with SchedulerPair(one, RULES, roles=("unified", "unified"), decode_engine=replace(one, tp=2)) as pair:
            ways = ((0, pair.prefill, pair.decode), (10, pair.decode, pair.prefill))
            legs = [
                await pair.exchange(first + room, prompt_of(room), prefill, decode, NUM_TOKENS)
                for first, prefill, decode in ways
                for room in ROOMS
            ]
            said = [first.token_ids + others.token_ids for first, others in legs]
            return said, [await each.ask_status() for each in (pair.decode, pair.prefill)]

    said, statuses = asyncio.run(run())
    expected = [generate(tiny_folder, prompt, num_tokens=NUM_TOKENS)[len(prompt) :] for prompt in map(prompt_of, ROOMS)]
    assert said == expected * 2
    for status in statuses:
        [counts] = [each for each in status.drafting.sources if each.source == "draft"]
        assert sum(counts.verified) >= sum(counts.accepted) > 0


@pytest.mark.parametrize("source", ["mtp", "eagle"])
def test_workers_that_guess_by_hidden_rows_give_the_same_tokens(tmp_path: Path, source: str) -> None:
    """Both ranks are told the hidden row of the prompt's last token, so the first guess is right, too."""
    if source == "mtp":
        folder, speculate = sure_next_layer.write(tmp_path / "sure", sure_next_layer.by_rows), source
    else:
        folder, head = eagle_heads.sure_folders(tmp_path, eagle_heads.by_rows)
        speculate = f"eagle:{head}"
    engine = EngineOptions(model=str(folder), kv_cache_mib=16, max_step_tokens=128, page_size=16, speculate=speculate)

    async def run() -> tuple[list[int], WorkerStatus]:
        async with SchedulerPair(engine, RULES, decode_engine=replace(engine, tp=2)) as pair:
            first, others = await pair.request(1, prompt_of(1), NUM_TOKENS)
            return first.token_ids + others.token_ids, await pair.decode.ask_status()

    said, status = asyncio.run(run())
    last = prompt_of(1)[-1]
    assert said == [(last + (at + 1) * sure_next_layer.SUCCESSOR) % 321 for at in range(NUM_TOKENS)]
    [counts] = [each for each in status.drafting.sources if each.source == source]
    assert sum(counts.verified) == sum(counts.accepted) > 0
