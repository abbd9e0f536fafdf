"""Sparse attention to the latents of DeepSeek V3.2, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from ahead_of_time import Kernel

from diptych.kernels.gpu.attention.choose_tokens import CHUNK, choose_tokens_kernel
from diptych.kernels.gpu.attention.choose_tokens import NUM_WARPS as CHOOSING_WARPS
from diptych.kernels.gpu.attention.decode_attention import FP8
from diptych.kernels.gpu.attention.index_scores import NUM_WARPS, IndexShape, index_scores_kernel
from diptych.kernels.gpu.attention.latent_attention import LatentShape
from diptych.kernels.gpu.attention.sparse_latent_attention import sparse_latent_kernel, sparse_merge_kernel

NUM_KEPT, PAGE_SIZE = 2048, 64
KINDS = (("bfloat16", torch.bfloat16, "*bf16"), ("FP8", FP8, "*i16"))
ROWS = {"page_table": "*i32", "requests": "*i32", "lens": "*i32"}
PARTS = {"part_values": "*fp32", "part_maxima": "*fp32", "part_sums": "*fp32"}
ANY_NUMBER = frozenset({"page_table", "requests", "lens", "num_rows", "table_stride", "num_parts"})


def numbers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def scores(name: str, kv_dtype: torch.dtype, kv_pointer: str) -> Kernel:
    types = {"index": "*bf16", "keys": kv_pointer, **ROWS, "scores": "*fp32"}
    types |= numbers("num_rows", "index_stride", "table_stride", "page_stride", "token_stride", "scores_stride")
    constants = IndexShape(64, 128, NUM_KEPT, PAGE_SIZE, torch.bfloat16, kv_dtype).constants
    return Kernel(
        f"index scores, {name}",
        index_scores_kernel,
        types,
        {**constants, "COMPILED": True},
        ANY_NUMBER,
        num_warps=NUM_WARPS,
        loads=frozenset({"async 16"}),
        never=frozenset({"ld.shared.b8"}),
    )


def attend(name: str, kv_dtype: torch.dtype, kv_pointer: str) -> Kernel:
    shape = LatentShape(128, 512, 64, PAGE_SIZE, torch.bfloat16, kv_dtype)
    types = {"q": "*bf16", "kv": kv_pointer, "chosen": "*i32", "lens": "*i32", "out": "*bf16", **PARTS}
    types |= numbers("q_stride", "out_stride", "chosen_stride", "page_stride", "token_stride", "num_parts")
    constants: dict[str, Any] = shape.decode_constants(1)
    constants.pop("BATCH")
    return Kernel(
        f"sparse latents, {name}",
        sparse_latent_kernel,
        types | {"score_scale": "fp32", "value_scale": "fp32"},
        {**constants, "NUM_KEPT": NUM_KEPT, "COMPILED": True},
        ANY_NUMBER,
        num_warps=shape.decode_tile.num_warps,
        loads=frozenset({"async 16"}),
        never=frozenset({"ld.shared.b8"}),
    )


def kernels() -> Iterator[Kernel]:
    for kind in KINDS:
        yield scores(*kind)
        yield attend(*kind)
    yield Kernel(
        "choose tokens",
        choose_tokens_kernel,
        {"scores": "*fp32", **ROWS, "chosen": "*i32", **numbers("scores_stride", "table_stride", "chosen_stride")},
        {"NUM_KEPT": NUM_KEPT, "PAGE_SIZE": PAGE_SIZE, "CHUNK": CHUNK},
        ANY_NUMBER,
        num_warps=CHOOSING_WARPS,
        loads=frozenset({"v4.b32"}),  # of scores
    )
    yield Kernel(
        "sparse merge",
        sparse_merge_kernel,
        {**PARTS, "lens": "*i32", "out": "*bf16", **numbers("out_stride", "num_parts"), "value_scale": "fp32"},
        {"NUM_HEADS": 128, "NUM_KEPT": NUM_KEPT, "DIM": 512, "DIM_BLOCK": 512, "BLOCK": 64, "TOGETHER": 8},
        ANY_NUMBER,
        loads=frozenset({"v4.b32"}),  # of the parts
    )
