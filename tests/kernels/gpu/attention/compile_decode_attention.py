"""Decode attention of Llama-3-8B, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ahead_of_time import Kernel

from diptych.kernels.gpu.attention.decode_attention import FP8, constants, launch_for, rows_together
from diptych.kernels.gpu.attention.decode_attention_kernel import decode_attention_kernel

POINTERS = {"sinks": "*fp32", "page_table": "*i32", "seq_lens": "*i32", "out": "*bf16"}
POINTERS |= {"firsts": "*i32", "counts": "*i32"}
WORKSPACE = {"part_values": "*fp32", "part_maxima": "*fp32", "part_sums": "*fp32", "arrived": "*i32"}
NUMBERS = ("batch_size", "q_stride", "out_stride", "table_stride", "page_stride", "value_offset", "token_stride")
FLOATS = ("score_scale", "value_scale", "softcap")
ANY_NUMBER = frozenset(
    {"page_table", "seq_lens", "firsts", "counts", "batch_size", "table_stride", "num_workers", "window"}
)


def decode(
    name: str, kv_dtype: torch.dtype, kv_pointer: str, batch: int = 64, rows: int = 1, group: int = 4, **options: bool
) -> Kernel:
    launch = launch_for(128, kv_dtype, group, batch)
    types = {"q": "*bf16", "kv": kv_pointer, **POINTERS, **WORKSPACE, **dict.fromkeys(NUMBERS, "i32")}
    types |= {"num_workers": "i32", "window": "i32", **dict.fromkeys(FLOATS, "fp32")}
    shapes = (batch, 8 * group, 128), (1000, 2, 16, 8, 128)
    return Kernel(
        name,
        decode_attention_kernel,
        types,
        {
            **constants(*shapes, torch.bfloat16, kv_dtype, False, launch, rows),
            **{"SINKS": False, "CHUNKED": False, "COMPILED": True},
            **options,
        },
        ANY_NUMBER,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        max_registers=launch.max_registers,
        loads=frozenset({"async 16"}),
        never=frozenset({"ld.shared.b8"}),
    )


def kernels() -> Iterator[Kernel]:
    yield decode("decode attention, bfloat16", torch.bfloat16, "*bf16")
    yield decode("decode attention, FP8", FP8, "*i16")
    yield decode("decode attention, sinks", torch.bfloat16, "*bf16", SINKS=True)
    yield decode("decode attention, chunks", torch.bfloat16, "*bf16", CHUNKED=True)
    yield decode("decode attention, few requests", torch.bfloat16, "*bf16", 8)
    yield decode("decode attention, FP8, few requests", FP8, "*i16", 8)
    yield decode("decode attention, rows", torch.bfloat16, "*bf16", rows=rows_together(4))
    yield decode("decode attention, rows, few requests", torch.bfloat16, "*bf16", 8, rows=rows_together(4))
    yield decode("decode attention, rows, FP8", FP8, "*i16", rows=rows_together(4))
    yield decode("decode attention, rows of a group of 8", torch.bfloat16, "*bf16", 8, rows_together(8), 8)
