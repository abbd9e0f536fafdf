"""Attention to keys and values that are made of the latents of DeepSeek V3, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ahead_of_time import Kernel

from diptych.kernels.gpu.attention.decompressed_attention import (
    constants_of,
    decompressed_attention_kernel,
    tile_for,
)

STATES = dict.fromkeys(("out", "nope", "rope", "made_keys", "made_values", "rotated"), "*bf16")
FOUND = dict.fromkeys(("found_values", "found_maxima", "found_sums"), "*fp32")
COUNTS = dict.fromkeys(("num_tokens", "num_keys", "offset"), "i32")
STRIDES = dict.fromkeys(
    (
        *("nope_stride", "nope_head_stride", "rope_stride", "rope_head_stride", "out_stride", "out_head_stride"),
        *("rotated_stride", "num_heads"),
    ),
    "i32",
)


def attend(name: str, *, first: bool, last: bool) -> Kernel:
    tile = tile_for(torch.bfloat16)
    return Kernel(
        name,
        decompressed_attention_kernel,
        {**STATES, **FOUND, **COUNTS, **STRIDES, "score_factor": "fp32"},
        {**constants_of(128, 64, 128), "FIRST": first, "LAST": last, "ROWS": tile.rows, "KEYS": tile.keys},
        frozenset(COUNTS),
        loads=frozenset({"async 16"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def kernels() -> Iterator[Kernel]:
    yield attend("decompressed, whole", first=True, last=True)
    yield attend("decompressed, between", first=False, last=False)
