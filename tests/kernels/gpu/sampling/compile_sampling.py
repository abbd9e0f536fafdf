"""The kernels of sampling, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator

from ahead_of_time import Kernel

from diptych.kernels.gpu.sampling.logits_adjust import (
    ENTRIES,
    MASKED_TOKENS,
    bias_kernel,
    penalties_kernel,
    token_mask_kernel,
)
from diptych.kernels.gpu.sampling.logprobs import logprobs_kernel
from diptych.kernels.gpu.sampling.sampling import choose_kernel
from diptych.kernels.gpu.sampling.sampling_blocks import BLOCK, FEW, LAUNCH, scan_blocks_kernel

LOGITS = {"logits": "*bf16", "row_stride": "i32"}
BLOCKS = {"maxima": "*fp32", "sums": "*fp32"}
SIZES = {"vocab_size": "i32", "num_blocks": "i32"}
ENTRY = {"logits": "*fp32", "row_stride": "i32", "rows": "*i64", "token_ids": "*i64"}


def choose() -> Kernel:
    """Describe the kernel for a batch that draws, from 128k tokens."""
    params = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "uniforms"), "*fp64")
    types = {**LOGITS, **params, **BLOCKS, "listed": "*i32", "few": "*fp32", "tokens": "*i32", "out": "*i64", **SIZES}
    constants = {"DRAWS": True, "BLOCK": BLOCK, "BLOCKS": 1024, "FEW": FEW}
    return Kernel("choose a token", choose_kernel, types, constants, frozenset({"num_blocks"}), LAUNCH.draw_warps)


def logprobs() -> Kernel:
    outputs = {"out": "*fp32", "top_ids": "*i64", "top_logprobs": "*fp32"}
    types = {**LOGITS, "token_ids": "*i64", **BLOCKS, **outputs, **SIZES, "num_top": "i32"}
    constants = {"BLOCK": BLOCK, "BLOCKS": 1024}
    return Kernel("logprobs", logprobs_kernel, types, constants, frozenset({"num_blocks", "num_top"}))


def kernels() -> Iterator[Kernel]:
    tile = {"WEIGHTS": True, "BLOCK": BLOCK, "BLOCKS": LAUNCH.tile_blocks}
    types = {**LOGITS, "temperature": "*fp64", **BLOCKS, **SIZES}
    wide = frozenset({"v4.b32"})
    yield Kernel("scan logits", scan_blocks_kernel, types, tile, frozenset({"num_blocks"}), loads=wide)
    yield choose()
    yield logprobs()
    entries, any_number = {"ENTRIES": ENTRIES}, frozenset({"num_entries"})
    yield Kernel("bias", bias_kernel, {**ENTRY, "values": "*fp32", "num_entries": "i32"}, entries, any_number)
    types = {**ENTRY, "repetition": "*fp32", "subtract": "*fp32", "num_entries": "i32"}
    yield Kernel("penalties", penalties_kernel, types, entries, any_number)
    types = {"logits": "*fp32", "row_stride": "i32", "token_mask": "*i32", "num_words": "i32", "vocab_size": "i32"}
    yield Kernel("token mask", token_mask_kernel, types, {"TOKENS": MASKED_TOKENS}, frozenset({"num_words"}))
