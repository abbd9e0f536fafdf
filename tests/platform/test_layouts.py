"""Prefill and decode whose KV lies differently, on a tiny model: other numbers of ranks, page sizes and number types.

Tokens are those of one engine wherever no number is rounded on the way. Where it is, they are those of a prompt whose
KV was computed as prefill's, rounded once, and continued as decode's.

Each platform is up to five schedulers that start. How pages of any layout become those of another,
`tests/kvtransfer/test_layouts.py` shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_steps import NUM_PAGES, next_token

from diptych.checkpoints.source import open_model
from diptych.engine import Engine, SamplingParams
from diptych.engine.runner.kv_pool import KV_DTYPES
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardMode
from diptych.kernels.page_pack import CELLS, cast

Platform = Any
DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="others start ranks of both kinds of pages")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, *range(20 * first)] for first in range(12)]

CASES = {
    "one rank and large pages to two and small": ("--tp 1 --page-size 64", "--tp 2 --page-size 16", 16),
    "four ranks, two for each KV head, and small pages to one and large": (
        *("--tp 4 --page-size 8", "--tp 1 --page-size 32"),
        32,
    ),
}


@pytest.fixture
def start(start_platform: Callable[..., Platform], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DIPTYCH_KV_CACHE_MIB", "4")
    monkeypatch.setenv("DIPTYCH_MAX_STEP_TOKENS", "64")

    def start(prefill: str, decode: str, folder: Path = tiny_folder) -> Platform:
        worker_options = ("--prefill-options", prefill, "--decode-options", decode)
        return start_platform(options=("--model", str(folder), "--threads", "1", *worker_options))

    return start


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


@pytest.mark.parametrize(
    ("prefill", "decode", "page_size"),
    [pytest.param(*case, marks=[DEEP] * name.startswith("one"), id=name) for name, case in CASES.items()],
)
def test_tokens_are_those_of_one_engine_and_every_page_was_moved_and_verified(
    start: Any, expected: list[tuple[int, ...]], prefill: str, decode: str, page_size: int
) -> None:
    platform = start(prefill, decode)
    moved = 0
    for _ in range(2):  # the second time the prompts are cached on both sides, each in pages of its own size
        answers = complete_all(platform)
        assert [output_ids(answer) for answer in answers] == expected
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            seen = answer["diptych"]
            wanted = -(-len(prompt) // page_size) - seen["decode_cached_tokens"] // page_size
            assert seen["prefill_pages_moved"] == seen["pages_moved"] == wanted >= 1
            assert seen["whole"], seen
            assert seen["prefill_kv_digest"] == seen["decode_kv_digest"]
            moved += wanted
    platform.assert_clean()
    statuses = platform.statuses()
    assert (sum(s.pages_sent for s in statuses), sum(s.pages_received for s in statuses)) == (moved, moved)


@DEEP
def test_latents_which_all_ranks_hold_are_handed_over_to_more_ranks(
    start: Any, tiny_latent_folder: Path, reference: Callable[..., Engine]
) -> None:
    assert_handed_over_whole(start, tiny_latent_folder, reference, "--tp 1", "--tp 2 --page-size 8")


@DEEP
def test_index_keys_are_handed_over_with_latents_to_other_pages_and_fewer_ranks(
    start: Any, tiny_sparse_folder: Path, reference: Callable[..., Engine]
) -> None:
    assert_handed_over_whole(start, tiny_sparse_folder, reference, "--tp 2", "--tp 1 --page-size 8")


@DEEP
def test_windows_of_layers_with_other_heads_are_handed_over_between_workers_of_two_ranks(
    start: Any, tiny_wide_folder: Path, reference: Callable[..., Engine]
) -> None:
    """Each rank has a copy of the wide head, in pages of groups that take turns."""
    assert len(open_model(str(tiny_wide_folder)).config.page_groups) == 3
    assert_handed_over_whole(start, tiny_wide_folder, reference, "--tp 2", "--tp 2")


def assert_handed_over_whole(
    start: Any, folder: Path, reference: Callable[..., Engine], prefill: str, decode: str
) -> None:
    alone = [each.token_ids for each in reference(folder).generate_batch(PROMPTS, GREEDY)]
    platform = start(prefill, decode, folder)
    answers = complete_all(platform)
    assert [output_ids(answer) for answer in answers] == alone
    for answer in answers:
        seen = answer["diptych"]
        assert seen["whole"], seen
        assert seen["prefill_kv_digest"] == seen["decode_kv_digest"]
    platform.assert_clean()


class Converted:
    """A prompt computed over KV of one type, then rounded once to another, and continued over that."""

    def __init__(self, folder: Path, src: str, dst: str) -> None:
        self.source, self.types = open_model(str(folder)), (src, dst)

    def tokens(self, prompt: list[int]) -> tuple[int, ...]:
        (computed, prefill), (narrow, decode) = map(self._model, self.types)
        text = [*prompt, next_token(prefill, ForwardMode.EXTEND, prompt)]
        src, dst = self.types
        narrow.view(CELLS[dst])[:] = cast(computed.view(CELLS[src]), src, dst)
        while len(text) < len(prompt) + GREEDY.max_tokens:
            text.append(next_token(decode, ForwardMode.DECODE, text))
        return tuple(text[len(prompt) :])

    def _model(self, kv_dtype: str) -> tuple[Any, ModelRunner]:
        layout = ModelRunner.pool_layout(self.source.config, num_pages=NUM_PAGES, page_size=16, dtype=kv_dtype)
        pages = np.zeros((layout.num_pages, layout.page_nbytes), np.uint8)
        kv = torch.from_numpy(pages).view(-1).view(KV_DTYPES[kv_dtype]).view(layout.shape)
        return pages, ModelRunner(self.source, kv, dtype="float32")


def test_kv_is_rounded_once_on_its_way(start: Any, tiny_folder: Path) -> None:
    platform = start("--kv-cache-dtype bfloat16", "--kv-cache-dtype fp8_e4m3")
    answers = complete_all(platform)
    model = Converted(tiny_folder, "bfloat16", "fp8_e4m3")
    assert [output_ids(answer) for answer in answers] == [model.tokens(prompt) for prompt in PROMPTS]
    for answer in answers:
        seen = answer["diptych"]
        assert seen["whole"], seen
        assert seen["prefill_kv_digest"] == seen["decode_kv_digest"]
    platform.assert_clean()
