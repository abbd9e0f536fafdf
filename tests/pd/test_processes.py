"""Hand-offs between real scheduler processes, over UCX."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scheduler_pair import MODULES, SchedulerPair

from diptych.engine.runtime.scheduler_config import EngineOptions
from diptych.engine.transfer_rules import TransferRules
from diptych.v1 import worker_pb2

NUM_LAYERS = 2
PAGE_SIZE = 512  # so that half a page of the tiny model is worth a write of its own
PROMPTS = [[(room * 31 + i) % 320 for i in range(300)] for room in range(1, 6)]


def options(model: Path, tp: int = 1) -> EngineOptions:
    return EngineOptions(model=str(model), kv_cache_mib=4, page_size=PAGE_SIZE, tp=tp)


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[list[int]]:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(tiny_folder)
    outputs = [model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False) for prompt in PROMPTS]
    return [output[0, len(PROMPTS[0]) :].tolist() for output in outputs]


@pytest.mark.parametrize("tp", [1, 2])
def test_pages_that_follow_the_step_by_layers_give_the_right_tokens(
    tiny_folder: Path, expected: list[list[int]], tp: int
) -> None:
    async def run() -> list[list[int]]:
        rules = TransferRules("always", num_windows=NUM_LAYERS)
        async with SchedulerPair(options(tiny_folder, tp=tp), rules) as pair:
            legs = [await pair.request(room, prompt, 4) for room, prompt in enumerate(PROMPTS, 1)]
            return [prefill.token_ids + decode.token_ids for prefill, decode in legs]

    assert asyncio.run(run()) == expected


def test_a_bit_that_flips_in_any_layer_is_caught_and_the_next_request_is_served(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def run() -> tuple[list[str], list[int], worker_pb2.WorkerStatus]:
        modules = {**MODULES, "decode": "damaging_decode"}
        async with SchedulerPair(options(tiny_folder), TransferRules("always"), modules=modules) as pair:
            legs = [await pair.request(room, prompt, 4) for room, prompt in enumerate(PROMPTS, 1)]
            errors = [decode.last.error.message for _, decode in legs if decode.last is not None]
            return errors, [len(decode.token_ids) for _, decode in legs], await pair.decode.ask_status()

    errors, num_tokens, status = asyncio.run(run())
    damaged = "KV pages arrived damaged: their digest is not prefill's"
    assert errors == [damaged] * 2 * NUM_LAYERS + [""]
    assert num_tokens == [0] * 2 * NUM_LAYERS + [3]
    assert (status.integrity_failures, status.open_rooms, list(status.problems)) == (4, 0, [])
