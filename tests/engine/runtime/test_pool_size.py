"""How many pages fit."""

from __future__ import annotations

from tiny_config import tiny_config

from diptych.engine.runtime.pool_size import pool_layout
from diptych.engine.runtime.scheduler_config import EngineOptions

MODEL = tiny_config()


def test_narrow_keys_and_values_let_more_tokens_fit() -> None:
    float32 = pool_layout(MODEL, EngineOptions(kv_cache_mib=1, dtype="float32"))
    assert (float32.dtype, float32.num_pages) == ("float32", 2**20 // (4 * 2 * 2 * 16 * 2 * 16))
    bfloat16 = pool_layout(MODEL, EngineOptions(kv_cache_mib=1, kv_cache_dtype="bfloat16"))
    fp8 = pool_layout(MODEL, EngineOptions(kv_cache_mib=1, kv_cache_dtype="fp8_e4m3"))
    assert (bfloat16.num_pages, fp8.num_pages) == (2 * float32.num_pages, 4 * float32.num_pages)


def test_by_default_keys_and_values_are_as_the_rest() -> None:
    assert pool_layout(MODEL, EngineOptions(kv_cache_mib=1, dtype="bfloat16")).dtype == "bfloat16"
