"""How many pages fit, and what is said before any process starts where too few do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tiny_config import tiny_config

from diptych.architectures.config import Indexer, Latent
from diptych.architectures.recurrent import DeltaNet, Recurrent
from diptych.architectures.stages import of_stage, stage_layers
from diptych.checkpoints.shard import Shard
from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import (
    check_pool,
    head_share,
    likely_device,
    num_host_slots,
    pool_layout,
    pool_words,
    rank_share,
    token_nbytes,
    whole_layout,
)

MODEL = tiny_config()
PAGE_BYTES = 4 * 2 * 2 * 16 * 2 * 16  # in float32
WIDE = dataclasses.replace(MODEL, num_layers=2 * MODEL.num_layers, num_kv_heads=8, num_heads=8, head_dim=128)
WIDE_PAGE_BYTES = 4 * 4 * 2 * 16 * 8 * 128  # 524,288: two a MiB


def test_narrow_keys_and_values_let_more_tokens_fit() -> None:
    float32 = pool_layout(MODEL, EngineOptions(kv_cache_mib=1, dtype="float32"))
    assert (float32.dtype, float32.num_pages) == ("float32", 2**20 // PAGE_BYTES)
    bfloat16 = pool_layout(MODEL, EngineOptions(kv_cache_mib=1, kv_cache_dtype="bfloat16"))
    fp8 = pool_layout(MODEL, EngineOptions(kv_cache_mib=1, kv_cache_dtype="fp8_e4m3"))
    assert (bfloat16.num_pages, fp8.num_pages) == (2 * float32.num_pages, 4 * float32.num_pages)


def test_by_default_keys_and_values_are_as_the_rest() -> None:
    assert pool_layout(MODEL, EngineOptions(kv_cache_mib=1, dtype="bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_mib": 1, "page_size": 32}, "hold 32 tokens, but 2 pages of 32 tokens .* --kv-cache-mib 2 at least"),
        ({"kv_cache_mib": 1, "max_model_len": 33}, "hold 32 tokens, fewer than --max-model-len 33: .*-mib 2 at least"),
        ({"kv_cache_mib": 8, "max_model_len": 4096}, "hold 256 tokens, fewer than --max-model-len 4096: .*-mib 128 at"),
        ({"max_model_len": 16_385}, "512 MiB of KV memory hold 16,384 tokens, fewer than --max-model-len 16385"),
    ],
)
def test_too_little_kv_memory_is_refused_with_what_it_takes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_pool(WIDE, EngineOptions(**options), Role.DECODE, "cpu")


def test_what_was_said_to_be_enough_is() -> None:
    for options in [
        EngineOptions(kv_cache_mib=2, page_size=32),
        EngineOptions(kv_cache_mib=2, max_model_len=33),
        EngineOptions(kv_cache_mib=128, max_model_len=4096),
    ]:
        check_pool(WIDE, options, Role.DECODE, "cpu")


def test_a_worker_that_does_both_needs_twice_as_much() -> None:
    options = EngineOptions(kv_cache_mib=2, max_model_len=64)
    check_pool(WIDE, options, Role.PREFILL, "cpu")
    with pytest.raises(ConfigError, match=r"shared by 2 parts, .*--kv-cache-mib 4 at least"):
        check_pool(WIDE, options, Role.UNIFIED, "cpu")
    check_pool(WIDE, dataclasses.replace(options, kv_cache_mib=4), Role.UNIFIED, "cpu")


RECURRENT = dataclasses.replace(MODEL, recurrent=Recurrent((0,), DeltaNet(16, 32, 128, 128, 4)))
STATE_BYTES = 4 * (8192 * 3 + 32 * 128 * 128)  # 134 pages of 16 KiB: one of its two layers keeps keys and values


def test_states_of_recurrent_layers_are_counted() -> None:
    """A request that begins with one and is handed over with another has both beside its tokens."""
    page_bytes = PAGE_BYTES // MODEL.num_layers
    num_pages = -(-STATE_BYTES // page_bytes)
    options = EngineOptions(kv_cache_mib=6, max_model_len=1024, dtype="float32")
    layout = pool_layout(RECURRENT, options)
    needed = {
        role: (2, 1024 // 16) if role is Role.DECODE else (3, 2 * 1024 // 16) for role in (Role.DECODE, Role.UNIFIED)
    }
    assert layout.page_nbytes == page_bytes
    for role, (num_states, of_tokens) in needed.items():
        enough = -(-(num_states * num_pages + of_tokens) * page_bytes // 2**20)
        check_pool(RECURRENT, dataclasses.replace(options, kv_cache_mib=enough), role, "cpu")
        with pytest.raises(ConfigError, match=f"beside {num_states} states of a request.* {enough} at least"):
            check_pool(RECURRENT, dataclasses.replace(options, kv_cache_mib=enough - 1), role, "cpu")


def test_what_rows_of_drafts_were_given_is_told_beside_states() -> None:
    """Channels, gates and two numbers of each value head, of 16 tokens of each request."""
    given = 16 * 4 * (8192 + 32 * 128 + 2 * 32)
    plain = EngineOptions(kv_cache_mib=6, max_model_len=1024, dtype="float32")
    for options, nbytes in ((plain, 0), (dataclasses.replace(plain, speculate="suffix"), given)):
        words = pool_words(RECURRENT, pool_layout(RECURRENT, options), options, 100)
        assert words.endswith(f"and {100 * (STATE_BYTES + nbytes) / 2**20:,.0f} MiB beside them for states")


def test_a_pool_that_holds_no_state_is_refused_with_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"hold 0 tokens beside 2 states of a request, but 2 pages .* at least"):
        pool_layout(RECURRENT, EngineOptions(kv_cache_mib=1, dtype="float32"))


WINDOWED = dataclasses.replace(WIDE, num_layers=6, windows=(64, 64, 0) * 2)  # a page has two layers, of three groups
WINDOWED_PAGE_BYTES = WIDE_PAGE_BYTES // 2


def test_pages_of_windows_are_counted_as_far_as_a_text_fills_them() -> None:
    """A short text has a page in every group; a long one its windows', a step's and what may have been passed."""
    for longest, pages in ((100, 3 * 7), (4096, 256 + 2 * (2 * 6 + 1 + 8))):
        options = EngineOptions(max_model_len=longest, max_step_tokens=128)
        enough = -(-pages * WINDOWED_PAGE_BYTES // 2**20)
        check_pool(WINDOWED, dataclasses.replace(options, kv_cache_mib=enough), Role.DECODE, "cpu")
        with pytest.raises(ConfigError, match=f"fewer than --max-model-len {longest}: .*-mib {enough} at least"):
            check_pool(WINDOWED, dataclasses.replace(options, kv_cache_mib=enough - 1), Role.DECODE, "cpu")
    with pytest.raises(ConfigError, match=r"hold 16 tokens, but 6 pages of 16 tokens .* --kv-cache-mib 2 at least"):
        check_pool(WINDOWED, EngineOptions(kv_cache_mib=1), Role.DECODE, "cpu")


def test_a_token_of_a_usual_request_has_its_part_of_what_windows_hold() -> None:
    layout, kept = (whole_layout(each, 16, "float32") for each in (WINDOWED, dataclasses.replace(WINDOWED, windows=())))
    assert token_nbytes(WINDOWED, layout) == WINDOWED_PAGE_BYTES // 16 + 2 * 4 * WINDOWED_PAGE_BYTES // 1024
    assert token_nbytes(dataclasses.replace(WINDOWED, windows=()), kept) == 3 * WINDOWED_PAGE_BYTES // 16


def test_what_windows_take_of_the_pool_is_told() -> None:
    layout, options = whole_layout(WINDOWED, 16, "float32"), EngineOptions()
    told = pool_words(WINDOWED, layout, options, 64)
    assert told == "1 KV pages of 16 tokens, of which a request has up to 12 for windows while it is decoded"


def test_what_states_take_beside_the_pool_is_told() -> None:
    options = EngineOptions(kv_cache_mib=8, dtype="float32")
    layout = pool_layout(RECURRENT, options)
    assert pool_words(MODEL, layout, options, 64) == f"{layout.num_pages} KV pages of 16 tokens"
    states = f"{64 * STATE_BYTES / 2**20:.0f} MiB beside them for states"
    assert pool_words(RECURRENT, layout, options, 64) == f"{layout.num_pages} KV pages of 16 tokens, and {states}"


def test_each_rank_holds_its_own_heads_only() -> None:
    options = EngineOptions(kv_cache_mib=1, max_model_len=64, tp=2)
    check_pool(WIDE, options, Role.DECODE, "cpu")
    with pytest.raises(ConfigError, match="fewer than --max-model-len"):
        check_pool(WIDE, dataclasses.replace(options, tp=1), Role.DECODE, "cpu")
    with pytest.raises(ConfigError, match="--tp 3 does not divide"):
        check_pool(WIDE, dataclasses.replace(options, tp=3), Role.DECODE, "cpu")


def test_stages_of_a_pipeline_have_as_many_pages_and_slots_as_the_one_with_the_most_layers() -> None:
    model = dataclasses.replace(MODEL, num_layers=3, vocab_size=1000)  # embeddings weigh more than a layer
    options = EngineOptions(kv_cache_mib=1, host_cache_mib=1, dtype="float32", pp=2, tp=2)
    check_pool(model, options, Role.DECODE, "cpu")
    stages, layouts = stage_layers(model, 2), []
    for rank in range(4):
        part = Shard(rank % 2, 2, layers=stages[rank // 2]).config(model)
        layouts.append(pool_layout(part, options, head_share(model, options, rank), model))
    assert [len(layout.sole_region.layers) for layout in layouts] == [2, 2, 1, 1]
    assert {layout.num_pages for layout in layouts} == {2**20 // layouts[0].page_nbytes}
    assert {num_host_slots(layout, options, model) for layout in layouts} == {2**20 // layouts[0].page_nbytes}
    assert [layout.rank for layout in layouts] == [0, 1, 0, 1]
    assert [layout.sole_region.layers for layout in layouts[1:3]] == [(0, 1), (2,)]
    assert {layout.num_layers for layout in layouts} == {3}
    with pytest.raises(ConfigError, match="--pp 4 is more than the 3 layers"):
        check_pool(model, dataclasses.replace(options, pp=4), Role.DECODE, "cpu")


def test_stages_of_a_model_with_an_indexer_have_as_many_pages_as_the_one_whose_pages_are_largest() -> None:
    """That with most layers has fewer index keys."""
    indexer = Indexer(num_heads=2, head_dim=96, num_kept=4, interleaved=False, layers=(0, 4, 5))
    latent = Latent(0, 24, 8, 8, 8, False, 1e-6)
    model = dataclasses.replace(
        MODEL, num_layers=6, windows=(), vocab_size=8, latent=latent, num_kv_heads=1, head_dim=32, indexer=indexer
    )
    options = EngineOptions(kv_cache_mib=1, dtype="float32", pp=2)
    layouts = [pool_layout(of_stage(model, layers), options, None, model) for layers in stage_layers(model, 2)]
    token = [4 * 32 + 96, 2 * 32 + 2 * 96]  # numbers
    assert [layout.page_nbytes for layout in layouts] == [16 * 4 * each for each in token]
    assert {layout.num_pages for layout in layouts} == {2**20 // (16 * 4 * max(token))}
    assert [rank_share(layout, sum(token)) for layout in layouts] == token


def test_what_a_gpu_has_left_is_not_guessed_and_what_was_given_there_counts_in_its_own_type() -> None:
    check_pool(WIDE, EngineOptions(max_model_len=10**6), Role.DECODE, "cuda")
    given = EngineOptions(kv_cache_mib=1, max_model_len=64)
    check_pool(WIDE, given, Role.DECODE, "cuda")  # bfloat16
    with pytest.raises(ConfigError, match="fewer than"):
        check_pool(WIDE, given, Role.DECODE, "cpu")


def test_a_device_is_guessed_by_what_a_gpu_always_has(tmp_path: Path) -> None:
    signs = (tmp_path / "nvidiactl", tmp_path / "dxg")
    assert likely_device("auto", signs) == "cpu"
    signs[1].touch()
    assert (likely_device("auto", signs), likely_device("cpu", signs), likely_device("sim", ())) == (
        "cuda",
        "cpu",
        "sim",
    )
