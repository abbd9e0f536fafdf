"""Two workers on GPUs whose KV lies differently, as tests/platform/test_layouts.py has it for CPUs, on a small model.

Each has its own GPU where there are two; both share one where there is only one. Tokens are those of one worker where
no number is rounded on the way; else those of KV computed as prefill's, rounded once, and continued as decode's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import two_gpus
from plain_steps import NUM_PAGES, next_token
from scheduler_pair import SchedulerPair

from diptych.checkpoints.source import open_model
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.runner.kv_pool import KV_DTYPES
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardMode
from diptych.engine.values.transfer_rules import TransferRules
from diptych.kernels.page_pack import CELLS, cast

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,  # where there are two
    pytest.mark.timeout(600),  # kernels are compiled
    pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU"),
]
NUM_TOKENS = 12
PROMPTS: Final = [[first, 5, 7, *range(9 * first)] for first in range(12)]
OPTIONS = EngineOptions(
    device="cuda", dtype="float32", kv_cache_mib=64, max_step_tokens=64, max_requests=16, cuda_graphs="off"
)
SECOND_GPU: Final = {"base_gpu": min(1, NUM_GPUS - 1)}
LAYOUTS: Final = [
    pytest.param({"page_size": 64}, {"page_size": 16, **SECOND_GPU}, id="large pages to small"),
    pytest.param({"page_size": 16}, {"page_size": 64, **SECOND_GPU}, id="small pages to large"),
    pytest.param({"page_size": 64}, {"page_size": 16, "tp": 2}, id="one rank to two", marks=two_gpus.MARKS),
    pytest.param(
        {"page_size": 16, "tp": 2}, {"page_size": 32, **SECOND_GPU}, id="two ranks to one", marks=two_gpus.MARKS
    ),
    pytest.param({"page_size": 16, "pp": 2}, {"page_size": 16, "tp": 2}, id="stages to ranks", marks=two_gpus.MARKS),
    pytest.param({"page_size": 16, "tp": 2}, {"page_size": 16, "pp": 2}, id="ranks to stages", marks=two_gpus.MARKS),
]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    return tokens_of_one(folder)


def tokens_of_one(folder: Path) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(str(folder), OPTIONS) as engine:
        return [list(each.token_ids) for each in engine.generate_batch(PROMPTS, params)]


def handed_over(folder: Path, of_prefill: Mapping[str, Any], of_decode: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens of all prompts, each of whose pages was moved once, and found whole by its digest."""
    prefill, decode = (replace(OPTIONS, model=str(folder), **each) for each in (of_prefill, of_decode))
    return asyncio.run(_handed_over(prefill, decode))


async def _handed_over(prefill: EngineOptions, decode: EngineOptions) -> list[list[int]]:
    async with SchedulerPair(prefill, TransferRules("always"), decode_engine=decode) as pair:
        rooms = enumerate(PROMPTS, 1)
        legs = await asyncio.gather(*(pair.request(room, prompt, NUM_TOKENS) for room, prompt in rooms))
        moved = 0
        for first, then in legs:
            assert first.last is not None
            assert then.last is not None
            assert not then.last.HasField("error"), then.last.error
            sent, received = first.last.stats, then.last.stats
            assert sent.kv_digest == received.kv_digest
            assert sent.pages_moved == received.pages_moved >= 1
            moved += sent.pages_moved
        status = await pair.decode.ask_status()
        assert (status.pages_received, status.integrity_failures, list(status.problems)) == (moved, 0, [])
        return [[*first.token_ids, *then.token_ids] for first, then in legs]


@pytest.mark.parametrize(("prefill", "decode"), LAYOUTS)
def test_tokens_are_those_of_one_worker_and_every_page_was_moved_and_verified(
    folder: Path, alone: list[list[int]], prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    assert handed_over(folder, prefill, decode) == alone


@pytest.mark.parametrize(
    "decode", [{"page_size": 64, **SECOND_GPU}, pytest.param({"page_size": 8, "tp": 2}, marks=two_gpus.MARKS)]
)
def test_latents_which_all_ranks_hold_are_handed_over(tiny_latent_folder: Path, decode: dict[str, Any]) -> None:
    assert handed_over(tiny_latent_folder, {"page_size": 16}, decode) == tokens_of_one(tiny_latent_folder)


@pytest.mark.parametrize(("src", "dst"), [("bfloat16", "fp8_e4m3"), ("fp8_e4m3", "float32")])
def test_kv_is_rounded_once_on_its_way(folder: Path, src: str, dst: str) -> None:
    of_decode = {"kv_cache_dtype": dst, **SECOND_GPU}
    model = Converted(folder, src, dst)
    assert handed_over(folder, {"kv_cache_dtype": src}, of_decode) == [model.tokens(prompt) for prompt in PROMPTS]


class Converted:
    """A prompt computed over KV of one type, then rounded once to another, and continued over that."""

    def __init__(self, folder: Path, src: str, dst: str) -> None:
        self._types = src, dst
        self._pools, self._runners = zip(*(_runner(folder, dtype) for dtype in self._types), strict=True)

    def tokens(self, prompt: list[int]) -> list[int]:
        prefill, decode = self._runners
        text = [*prompt, next_token(prefill, ForwardMode.EXTEND, prompt)]
        self._convert()
        while len(text) < len(prompt) + NUM_TOKENS:
            text.append(next_token(decode, ForwardMode.DECODE, text))
        return text[len(prompt) :]

    def _convert(self) -> None:
        (src, dst), (computed, continued) = self._types, self._pools
        numbers = computed.view(torch.uint8).cpu().numpy().view(CELLS[src])
        converted = np.ascontiguousarray(cast(numbers, src, dst)).view(np.uint8)
        continued.view(torch.uint8).copy_(torch.from_numpy(converted))


def _runner(folder: Path, kv_dtype: str) -> tuple[torch.Tensor, ModelRunner]:
    source = open_model(str(folder))
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=16, dtype=kv_dtype)
    kv = torch.zeros(layout.shape, dtype=torch.float32, device=OPTIONS.device).to(KV_DTYPES[kv_dtype])
    return kv, ModelRunner(source, kv, dtype="float32")
