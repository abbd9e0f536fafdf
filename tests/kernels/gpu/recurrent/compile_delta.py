"""The kernels of a gated delta rule, for `test_compile.py`: Qwen3-Next's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ahead_of_time import Kernel

from diptych.kernels.gpu.layers import activations
from diptych.kernels.gpu.recurrent import delta_chunks, delta_rule

NARROW = ("corrections", "changes", "scores", "projected", "mixed", "newest", "conv", "norm", "out", "channels")
WIDE = ("kept", "decay", "decay_bias", "totals", "found")
TYPES = dict.fromkeys(NARROW, "*bf16") | dict.fromkeys(WIDE, "*fp32")
TYPES |= {"slots": "*i64", "lens": "*i32", "starts": "*i32", "scale": "fp32", "eps": "fp32"}
TYPES |= {"newest_stride": "i64", "kept_stride": "i64", "first_request": "i32"}
ANY = frozenset({"first_request", *delta_rule.PER_ROW})
PLACE = torch.empty(0)
LAYER = delta_rule.DeltaLayer(16, 32, 128, 128, torch.empty(8192, 4), PLACE, PLACE, PLACE, 1e-6)
SIZES = {"TOKEN": LAYER.token_size, "CHANNELS": LAYER.num_channels}


def kernel(name: str, function: Any, arguments: str, constants: Mapping[str, Any], **options: Any) -> Kernel:
    names = arguments.split()
    return Kernel(name, function, {each: TYPES[each] for each in names}, constants, ANY & {*names}, **options)


def single() -> Iterator[Kernel]:
    conv = "projected newest newest_stride conv slots lens starts mixed"
    delta = "mixed projected kept kept_stride decay decay_bias norm slots lens starts found out scale eps"
    width = {"WIDTH": 4, "TILE": delta_rule.CHANNELS_TILE}
    yield kernel("delta rule, convolution of single tokens", delta_rule.convolve_single_kernel, conv, SIZES | width)
    yield kernel(
        "delta rule, single tokens",
        delta_rule.delta_single_kernel,
        delta,
        SIZES | LAYER.constants | {"PARTS": delta_rule.PARTS},
        num_warps=delta_rule.warps(LAYER),
        loads=frozenset({"v4.b32"}),
    )


def prompts() -> Iterator[Kernel]:
    launch = delta_chunks.LAUNCH
    yield kernel(
        "delta rule, convolution of prompts",
        delta_chunks.convolve_prompts_kernel,
        "projected newest newest_stride conv slots starts first_request out scale",
        delta_chunks.conv_constants(LAYER) | {"TOKENS": launch.conv_tokens},
        num_warps=launch.conv_warps,
        loads=frozenset({"v4.b32"}),
    )
    yield kernel(
        "delta rule, chunks",
        delta_chunks.prepare_chunks_kernel,
        "projected channels decay decay_bias slots starts first_request corrections changes scores totals",
        delta_chunks.chunk_constants(LAYER) | {"PRECISION": "tf32"},
        num_warps=launch.chunk_warps,
    )
    yield kernel(
        "delta rule, norm",
        delta_chunks.norm_and_gate_kernel,
        "projected norm slots starts first_request out eps",
        delta_chunks.norm_constants(LAYER),
        num_warps=launch.norm_warps,
    )


def kernels() -> Iterator[Kernel]:
    yield from single()
    yield from prompts()
    sigmoid = {"x": "*bf16", "gates": "*bf16", "size": "i32"}
    yield Kernel(
        "sigmoid",
        activations.mul_sigmoid_kernel,
        sigmoid,
        {"TILE": activations.TILE_NUMBERS},
        loads=frozenset({"v4.b32"}),
    )
