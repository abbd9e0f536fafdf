"""The kernels of recurrent layers, for `test_compile.py`: Kimi Linear, Nemotron 3 Nano, and Qwen3-Next's scan."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ahead_of_time import Kernel

from diptych.kernels.gpu.recurrent import (
    chunk_scan,
    kimi_delta_chunks,
    kimi_delta_step,
    mamba2_chunks,
    mamba2_step,
    short_conv_prompts,
    short_conv_step,
    slot_rows,
)
from diptych.kernels.gpu.recurrent.chunk_scan import CHUNK, Chunks

FLOATS = "*fp32"
UNALIGNED = frozenset({"slots", "lens", "decay_stride", "beta_stride", "step_stride"})
ROWS = {"slots": "*i64", "lens": "*i32"}
PROMPTS = {"slots": "*i64", "starts": "*i32", "first_request": "i32"}


def convolution(name: str, channels: int, width: int, *, has_bias: bool) -> Kernel:
    types = {"x": "*bf16", "state": "*bf16", **ROWS, "weight": FLOATS, "bias": FLOATS, "out": FLOATS}
    constants = {"CHANNELS": channels, "WIDTH": width, "HAS_BIAS": has_bias, "TILE": short_conv_step.TILE}
    kernel = short_conv_step.short_conv_step_kernel
    return Kernel(f"short convolution, {name}", kernel, types | {"slot_stride": "i64"}, constants, UNALIGNED & {*ROWS})


def kimi() -> Kernel:
    types = {"mixed": FLOATS, "decays": "*bf16", "betas": "*bf16", "rate": FLOATS, "bias": FLOATS, "state": FLOATS}
    types |= ROWS | {"out": FLOATS, "decay_stride": "i32", "beta_stride": "i32", "slot_stride": "i64"}
    constants = {"NUM_HEADS": 32, "DIM": 128, "KEYS": 128, "VALUES": 64}
    return Kernel(
        "Kimi's delta rule",
        kimi_delta_step.kimi_delta_step_kernel,
        types,
        constants,
        UNALIGNED - {"step_stride"},
        loads=frozenset({"v4.b32"}),
    )


def mamba() -> Kernel:
    types = {"mixed": FLOATS, "steps": "*bf16", "rate": FLOATS, "bias": FLOATS, "skip": FLOATS, "state": FLOATS}
    types |= ROWS | {"out": FLOATS, "min_step": "fp32", "step_stride": "i32", "slot_stride": "i64"}
    constants = {"NUM_HEADS": 64, "GROUP": 8, "DIM": 64, "SIZE": 128, "DIMS": 32, "COLUMNS": 128}
    return Kernel(
        "state spaces",
        mamba2_step.mamba2_step_kernel,
        types,
        constants,
        UNALIGNED & {*ROWS, "step_stride"},
        loads=frozenset({"v4.b32"}),
    )


def kept_rows() -> Kernel:
    types = {"projected": "*bf16", **ROWS, "given": "*bf16", "stride": "i32"}
    constants = {"ROW": 16 * 12_352, "SIZE": 12_352, "TILE": slot_rows.TILE}
    return Kernel("kept rows", slot_rows.keep_rows_kernel, types, constants, frozenset(ROWS))


def scan(name: str, chunks: Chunks, strides: tuple[int, int], found: str, operands: str = "*bf16") -> Kernel:
    narrow = dict.fromkeys(("queries", "keys", "corrections", "changes", "scores"), operands)
    types = narrow | dict.fromkeys(("totals", "sizes", "skip", "kept"), FLOATS)
    types |= {"query_stride": "i32", "key_stride": "i32", "found": found}
    launch = chunk_scan.choose_launch(chunks)
    return Kernel(
        f"chunks in turn, {name}",
        chunk_scan.scan_chunks_kernel,
        types | {"kept_stride": "i64"} | PROMPTS,
        chunk_scan.scan_constants(chunks, strides, launch),
        frozenset(PROMPTS),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        loads=frozenset({"async 16" if launch.num_stages > 1 else "v4.b32"}),
    )


def scans() -> Iterator[Kernel]:
    narrow = torch.empty(1, 32, 128, dtype=torch.bfloat16)
    scores, totals = torch.empty(1, 32, CHUNK), torch.empty(1, 32)
    delta = Chunks(narrow[:, :16], narrow[:, :16], narrow, narrow, scores, totals)
    kimi = Chunks(narrow, narrow, narrow, narrow, scores, totals.expand(128, 1, 32).mT)
    yield scan("gated delta rule", delta, (128, 1), "*bf16")
    yield scan("Kimi's delta rule", kimi, (128, 1), FLOATS)
    wide = narrow.float()
    exact = Chunks(wide[:, :16], wide[:, :16], wide, wide, scores, totals)
    yield scan("gated delta rule, float32", exact, (128, 1), FLOATS, FLOATS)
    values = torch.empty(1, 64, 64, dtype=torch.bfloat16)
    spaces = Chunks(narrow[:, :8], narrow[:, :8], None, values, scores, totals)
    yield scan("state spaces", spaces, (1, 128), FLOATS)


def kimi_prompts() -> Iterator[Kernel]:
    launch = kimi_delta_chunks.LAUNCH
    types = {"decays": "*bf16", "decay_stride": "i32", "rate": FLOATS, "bias": FLOATS, "totals": FLOATS}
    yield Kernel(
        "Kimi's decays",
        kimi_delta_chunks.add_up_decays_kernel,
        types | PROMPTS,
        kimi_delta_chunks.decay_constants(32, 128),
        UNALIGNED & {"decay_stride"} | {*PROMPTS},
        num_warps=launch.decay_warps,
    )
    types = dict.fromkeys(("queries", "keys", "corrections", "changes", "scores", "betas"), "*bf16")
    types |= {"mixed": FLOATS, "totals": FLOATS, "beta_stride": "i32", "scale": "fp32"}
    yield Kernel(
        "Kimi's chunks",
        kimi_delta_chunks.prepare_kimi_chunks_kernel,
        types | PROMPTS,
        kimi_delta_chunks.chunk_constants(32, 128, torch.bfloat16),
        UNALIGNED & {"beta_stride"} | {*PROMPTS},
        num_warps=launch.chunk_warps,
        num_stages=1,
        loads=frozenset({"v4.b32"}),
    )


def mamba_prompts() -> Kernel:
    types = dict.fromkeys(("queries", "keys", "changes", "scores", "steps"), "*bf16")
    types |= dict.fromkeys(("mixed", "rate", "bias", "totals", "sizes"), FLOATS)
    return Kernel(
        "state spaces, chunks",
        mamba2_chunks.prepare_mamba_chunks_kernel,
        types | {"step_stride": "i32", "min_step": "fp32"} | PROMPTS,
        mamba2_chunks.chunk_constants(64, 8, 64, 128, torch.bfloat16),
        UNALIGNED & {"step_stride"} | {*PROMPTS},
        num_warps=mamba2_chunks.LAUNCH.chunk_warps,
        loads=frozenset({"v4.b32"}),
    )


def convolutions_of_prompts() -> Iterator[Kernel]:
    types = {"x": "*bf16", "state": "*bf16", "slot_stride": "i64"} | PROMPTS
    sizes = {"CHANNELS": 6144, "WIDTH": 4, "TILE": short_conv_prompts.TILE}
    yield Kernel(
        "short convolution of prompts",
        short_conv_prompts.short_conv_prompts_kernel,
        types | {"weight": FLOATS, "bias": FLOATS, "out": FLOATS},
        sizes | {"HAS_BIAS": True, "TOKENS": short_conv_prompts.TOKENS},
        frozenset(PROMPTS),
        loads=frozenset({"v4.b32"}),
    )
    yield Kernel(
        "newest inputs of prompts",
        short_conv_prompts.keep_newest_kernel,
        {"projected": "*bf16", "newest": "*bf16", "newest_stride": "i64"} | PROMPTS,
        sizes | {"TOKEN": 6144},
        frozenset(PROMPTS),
    )


def kernels() -> Iterator[Kernel]:
    yield convolution("Kimi's", 3 * 4096, 4, has_bias=False)
    yield convolution("Mamba's", 6144, 4, has_bias=True)
    yield kimi()
    yield mamba()
    yield kept_rows()
    yield from scans()
    yield from kimi_prompts()
    yield mamba_prompts()
    yield from convolutions_of_prompts()
