"""Attention to the latents of DeepSeek V3, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ahead_of_time import Kernel

from diptych.kernels.gpu.attention.decode_attention import FP8
from diptych.kernels.gpu.attention.hopper_latent import (
    BOX,
    chosen_constants,
    constants,
)
from diptych.kernels.gpu.attention.hopper_latent_kernel import (
    NARROW_TILE,
    TILE,
    hopper_chosen_kernel,
    hopper_latent_decode_kernel,
    hopper_latent_extend_kernel,
)
from diptych.kernels.gpu.attention.latent_attention import LatentShape
from diptych.kernels.gpu.attention.latent_attention_kernels import (
    latent_decode_kernel,
    latent_extend_kernel,
    latent_merge_kernel,
)

PARTS = {"part_values": "*fp32", "part_maxima": "*fp32", "part_sums": "*fp32"}
NUMBERS = ("batch_size", "q_stride", "out_stride", "table_stride", "page_stride", "token_stride")
FLOATS = {"score_scale": "fp32", "value_scale": "fp32"}
ANY_NUMBER = frozenset(
    {"page_table", "seq_lens", "extend_starts", "batch_size", "table_stride", "num_workers", "lens", "num_parts"}
)


def attend(name: str, kv_dtype: torch.dtype, kv_pointer: str, *, decode: bool) -> Kernel:
    shape = LatentShape(128, 512, 64, 64, torch.bfloat16, kv_dtype)
    pointers = {"q": "*bf16", "kv": kv_pointer, "page_table": "*i32", "seq_lens": "*i32", "out": "*bf16"}
    more = PARTS | {"num_workers": "i32"} if decode else {"extend_starts": "*i32"}
    constants = shape.decode_constants(64) if decode else shape.extend_constants()
    return Kernel(
        name,
        latent_decode_kernel if decode else latent_extend_kernel,
        {**pointers, **more, **dict.fromkeys(NUMBERS, "i32"), **FLOATS},
        {**constants, "COMPILED": True} | ({"EARLY": True} if decode else {}),
        ANY_NUMBER,
        loads=frozenset({"async 16"}),
        never=frozenset({"ld.shared.b8"}),
        num_warps=(shape.decode_tile if decode else shape.extend_tile).num_warps,
    )


def on_hopper(name: str, kv_dtype: torch.dtype, kv_name: str, page_size: int, *, decode: bool) -> Kernel:
    layout = (NARROW_TILE if kv_dtype == FP8 else TILE).value
    pointers = {"q": "*bf16", "kv": f"tensordesc<{kv_name}[{page_size},{BOX}],{layout!r}>"}
    pointers |= {"page_table": "*i32", "seq_lens": "*i32", "out": "*bf16"}
    more = PARTS | {"num_workers": "i32"} if decode else {"extend_starts": "*i32"}
    own = {"HEAD_TILES": 2, "BATCH": 256, "EARLY": True} if decode else {}
    return Kernel(
        name,
        hopper_latent_decode_kernel if decode else hopper_latent_extend_kernel,
        {**pointers, **more, **dict.fromkeys(NUMBERS[:4], "i32"), **FLOATS},
        {"HEADS": 128, **own, **constants(torch.bfloat16, kv_dtype, page_size, 4 * page_size)},
        ANY_NUMBER,
        loads=frozenset() if kv_dtype == FP8 else frozenset({"async 16"}),  # of queries
        # parts, results, and a maximum or a sum of a row
        stores=frozenset({"v4.b32", "v2.b32", "b32"} if decode else {"v2.b32"}),
    )


def gathering(name: str, kv_dtype: torch.dtype, kv_pointer: str) -> Kernel:
    pointers = {"q": "*bf16", "kv": kv_pointer, "chosen": "*i32", "lens": "*i32", "out": "*bf16"}
    return Kernel(
        name,
        hopper_chosen_kernel,
        {
            **pointers,
            **PARTS,
            **dict.fromkeys(("q_stride", "out_stride", "chosen_stride", "num_parts"), "i32"),
            **FLOATS,
        },
        {"HEADS": 128, "HEAD_TILES": 2, "NUM_KEPT": 2048, **chosen_constants(torch.bfloat16, kv_dtype, 64, 256)},
        ANY_NUMBER,
        loads=frozenset({"async 16"}),  # of what was chosen
        stores=frozenset({"v4.b32", "v2.b32", "b32"}),
    )


def kernels() -> Iterator[Kernel]:
    yield attend("latent decode, bfloat16", torch.bfloat16, "*bf16", decode=True)
    yield attend("latent decode, FP8", FP8, "*i16", decode=True)
    yield attend("latent extend, bfloat16", torch.bfloat16, "*bf16", decode=False)
    yield attend("latent extend, FP8", FP8, "*i16", decode=False)
    yield on_hopper("latent decode on Hopper", torch.bfloat16, "bf16", 64, decode=True)
    yield on_hopper("latent decode on Hopper, small pages", torch.bfloat16, "bf16", 16, decode=True)
    yield on_hopper("latent decode on Hopper, FP8", FP8, "fp8e4nv", 64, decode=True)
    yield on_hopper("latent extend on Hopper", torch.bfloat16, "bf16", 64, decode=False)
    yield gathering("chosen latents on Hopper", torch.bfloat16, "*bf16")
    yield gathering("chosen latents on Hopper, FP8", FP8, "*fp8e4nv")
    yield Kernel(
        "latent merge",
        latent_merge_kernel,
        {**PARTS, "seq_lens": "*i32", "out": "*bf16", "batch_size": "i32", "out_stride": "i32", "num_workers": "i32"}
        | {"value_scale": "fp32"},
        {"NUM_HEADS": 128, "DIM": 512, "DIM_BLOCK": 512, "BLOCK": 64, "BATCH": 256, "TOGETHER": 2, "EARLY": True},
        ANY_NUMBER,
        loads=frozenset({"v4.b32"}),  # of the parts
    )
