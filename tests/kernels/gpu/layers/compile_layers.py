"""The kernels of a layer beside attention, for `test_compile.py`: Llama-3-8B, and Mixtral-8x7B where it has experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ahead_of_time import Kernel

from diptych.kernels.gpu.layers import (
    activations,
    fixed_gemm,
    fp8_experts,
    fp8_gemm,
    fp8_gemv,
    fp8_rows,
    int4_experts,
    integer_gemm,
    integer_matrix,
    low_rank,
    moe,
    mxfp4_experts,
    norms,
    skinny_gated_gemm,
    skinny_gemm,
)
from diptych.kernels.gpu.layers.fp8_matrix import Fp8Matrix, pitch_of
from diptych.kernels.gpu.layers.fp8_rows import GROUP
from diptych.kernels.integer_layout import IntegerLayout

HIDDEN, FFN = 4096, 14_336
CELLS = frozenset({"v4.b32"})
COPIES = frozenset({"async 16"})


def pointers(names: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "*bf16") | others


def rowwise(name: str, kernel: Any, types: Mapping[str, str]) -> Kernel:
    constants = {"SIZE": HIDDEN, "COLUMNS": HIDDEN}
    return Kernel(name, kernel, types, constants, num_warps=norms.warps(HIDDEN), loads=CELLS)


def heads() -> Kernel:
    constants = {"NUM_HEADS": 32, "NUM_NORMED": 40, "ROW": 48 * 128, "HEAD_DIM": 128, "HEADS": 8}
    types = pointers("qkv q_weight k_weight", eps="fp32")
    return Kernel("norm of heads", norms.norm_heads_kernel, types, constants, loads=CELLS, stores=CELLS)


def activation(name: str, called: str) -> Kernel:
    constants = {"SIZE": FFN, "TILE": activations.TILE_NUMBERS, "ACTIVATION": called, "ALPHA": 1.702, "LIMIT": 7.0}
    return Kernel(name, activations.activate_kernel, pointers("gate_up out"), constants, loads=CELLS, stores=CELLS)


def fixed(name: str, num_rows: int) -> Kernel:
    tile = fixed_gemm.choose_tile(num_rows, torch.bfloat16)
    return Kernel(
        f"fixed GEMM, {name}",
        fixed_gemm.fixed_gemm_kernel,
        pointers("x weight out", m="i32", n="i32"),
        tile.weight.constants(tile.block_m, HIDDEN) | {"GROUP": fixed_gemm.BLOCKS_A_GROUP},
        frozenset({"m"}),
        num_warps=tile.weight.num_warps,
        num_stages=tile.weight.num_stages,
        loads=COPIES,
    )


def skinny(name: str, n: int, k: int) -> Kernel:
    tile = skinny_gemm.choose_tile(n)
    return Kernel(
        f"skinny GEMM, {name}",
        skinny_gemm.skinny_gemm_kernel,
        pointers("x weight out", m="i32", n="i32"),
        tile.constants(skinny_gemm.MAX_ROWS, k),
        frozenset({"m"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=COPIES,
    )


def gates(name: str, ffn_size: int, called: str) -> Kernel:
    tile = skinny_gated_gemm.choose_tile(ffn_size)
    constants = {"FFN_SIZE": ffn_size, "ACTIVATION": called, **tile.constants(skinny_gemm.MAX_ROWS, HIDDEN)}
    return Kernel(
        f"gated GEMM, {name}",
        skinny_gated_gemm.skinny_gated_gemm_kernel,
        pointers("x weight out", m="i32"),
        constants,
        frozenset({"m"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=COPIES,
    )


def experts() -> Iterator[Kernel]:
    arrays = {"chosen": "*i64", "counts": "*i32"}
    yield Kernel("MoE, count", moe.count_kernel, arrays | {"size": "i32"}, {"TILE": 1024}, frozenset({"size"}))
    types = arrays | {"assignments": "*i32", "experts": "*i32", "size": "i32", "max_blocks": "i32"}
    constants = {"NUM_EXPERTS": 8, "EXPERTS": 8, "BLOCK": 16, "TILE": 1024}
    for name, how in (("counted", {"COUNTED": True}), ("not counted", {"COUNTED": False})):
        yield Kernel(f"MoE, place, {name}", moe.place_kernel, types, constants | how, frozenset({"size", "max_blocks"}))
    for block in moe.BLOCKS:
        yield grouped(block, "bf16", 2)
    yield grouped(moe.BLOCKS[-1], "fp32", 4)
    for block in mxfp4_experts.MXFP4_BLOCKS:
        yield mxfp4(block, "bf16", 2880)
    for few, _ in mxfp4_experts.TILES_OF_FEW:
        yield mxfp4(mxfp4_experts.MXFP4_BLOCKS[0], "bf16", 2880, few)
    yield mxfp4(mxfp4_experts.MXFP4_BLOCKS[0], "fp16", 2880)
    yield mxfp4(mxfp4_experts.MXFP4_BLOCKS[0], "bf16", HIDDEN)
    for block in int4_experts.INT4_BLOCKS:
        yield int4(block, "bf16", 128)
    for few, _ in int4_experts.TILES_OF_FEW:
        yield int4(int4_experts.INT4_BLOCKS[0], "bf16", 128, few)
    yield int4(int4_experts.INT4_BLOCKS[0], "fp16", 32)
    for block in fp8_experts.FP8_BLOCKS:
        yield fp8_grouped(block, 128)
    yield fp8_grouped(fp8_experts.FP8_BLOCKS[0], 0)
    yield fp8_grouped(fp8_experts.FP8_BLOCKS[-1], 0)
    types, constants = pointers("results shares out"), {"SIZE": HIDDEN, "NUM_CHOICES": 2, "CHOICES": 2, "TILE": 1024}
    types = {name: types.get(name, "*i64") for name in ("results", "chosen", "shares", "out")}
    yield Kernel("MoE, combine", moe.combine_kernel, types, constants, loads=CELLS, stores=CELLS)


def grouped(block: int, dtype: str, nbytes: int) -> Kernel:
    tile = moe.tile_of(block, nbytes)
    constants = {"REPEATS": 2, "GROUP": moe.BLOCKS_A_GROUP, "ALIGNMENT": moe.VECTOR_NBYTES}
    constants |= tile.constants(block, HIDDEN)
    types = {"x": f"*{dtype}", "addresses": "*i64", "assignments": "*i32", "experts": "*i32", "out": f"*{dtype}"}
    types |= {"num_assignments": "i32", "max_blocks": "i32", "n": "i32"}
    return Kernel(
        f"MoE, {block} rows of {dtype}",
        moe.grouped_gemm_kernel,
        types,
        constants,
        frozenset({"num_assignments", "max_blocks"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=COPIES,
    )


def mxfp4(block: int, dtype: str, k: int, num_rows: int = 1 << 20) -> Kernel:
    """gpt-oss's, whose last strip is half full, and one of full strips."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tile = mxfp4_experts.tile_of(block, kind, num_rows)
    types = {"x": f"*{dtype}", "words": "*i64", "scales": "*i64", "assignments": "*i32", "experts": "*i32"}
    types |= {"bias": f"*{dtype}", "out": f"*{dtype}", "num_assignments": "i32", "max_blocks": "i32", "n": "i32"}
    return Kernel(
        f"MXFP4 experts, {block} rows of {dtype}, {k} columns, {num_rows} rows of weights",
        mxfp4_experts.grouped_mxfp4_kernel,
        types,
        mxfp4_experts.constants(tile, block, k, 4, has_bias=True) | {"COMPILED": True},
        frozenset({"num_assignments", "max_blocks"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=frozenset({"async 16", "async 4"}),  # codes and states, scales
    )


def adapters() -> Iterator[Kernel]:
    """Adapters have rank 16 to 64; tokens are few and many."""
    slots = {"memory": "*bf16", "heads": "*i64", "tokens": "*i32", "tiles": "*i32"}
    sizes = {"num_tokens": "i32", "slot_size": "i64", "head_size": "i32", "first_part": "i32"}
    odd = frozenset({"num_tokens", "first_part"})
    for tile, block_n in ((16, 64), (64, 128)):
        constants = {"MAX_RANK": 64, "TILE": tile, "BLOCK_R": 64}
        types = {"x": "*bf16", **slots, "inner": "*fp32", "k": "i32", "columns": "i32", **sizes}
        shrink = low_rank.shrink_kernel
        yield Kernel(f"shrink, {tile}", shrink, types, constants | {"BLOCK_K": 128}, odd, loads=COPIES)
        types = {"inner": "*fp32", **slots, "out": "*bf16", "out_size": "i32", **sizes}
        expand = low_rank.expand_kernel
        yield Kernel(
            f"expand, {tile}",
            expand,
            types,
            constants | {"BLOCK_N": block_n, "SPLITS": 16 if tile == 16 else 1, "ALIGNED": True},
            odd,
            loads=CELLS,
            stores=CELLS,
        )
        types = {"ids": "*i64", **slots, "inner": "*fp32", **sizes}
        del types["num_tokens"]
        yield Kernel(f"pick, {tile}", low_rank.pick_kernel, types, constants, odd)


def int4(block: int, dtype: str, group: int, num_rows: int = 1 << 20) -> Kernel:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tile = int4_experts.tile_of(block, kind, num_rows)
    types = {"x": f"*{dtype}", "words": "*i64", "scales": "*i64", "assignments": "*i32", "experts": "*i32"}
    types |= {"bias": f"*{dtype}", "out": f"*{dtype}", "num_assignments": "i32", "max_blocks": "i32", "n": "i32"}
    return Kernel(
        f"INT4 experts, {block} rows of {dtype}, groups of {group}, {num_rows} rows of weights",
        int4_experts.grouped_int4_kernel,
        types,
        int4_experts.constants(tile, block, HIDDEN, 8, group, has_bias=True) | {"COMPILED": True},
        frozenset({"num_assignments", "max_blocks"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=frozenset({"async 16", "async 4"}),  # codes and states, scales
    )


def fp8_grouped(block: int, group: int) -> Kernel:
    tile = fp8_experts.tile_of(block, group)
    codes = torch.empty(2 * FFN, HIDDEN, dtype=torch.float8_e4m3fn, device="meta")
    matrix = Fp8Matrix(codes, torch.empty(1, 1, device="meta"), group)
    types = {"x": "*fp8e4nv", "x_scales": "*fp32", "codes": "*i64", "scales": "*i64", "assignments": "*i32"}
    types |= {"experts": "*i32", "bias": "*bf16", "out": "*bf16"}
    types |= dict.fromkeys(("num_assignments", "num_rows", "max_blocks", "n"), "i32")
    return Kernel(
        f"FP8 experts, {block} rows, a scale {group or 'all'} columns",
        fp8_experts.grouped_fp8_kernel,
        types,
        fp8_experts.constants(tile, block, matrix, 8, has_bias=True) | {"COMPILED": True},
        frozenset({"num_assignments", "num_rows", "max_blocks"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=COPIES,
    )


def fp8() -> Iterator[Kernel]:
    types = pointers("x", codes="*fp8e4nv", scales="*fp32")
    constants = {"COMPILED": True} | fp8_rows.row_constants(FFN)
    yield Kernel("FP8, rows", fp8_rows.quantize_rows_kernel, types, constants, num_warps=8, loads=CELLS)
    constants = {"K": FFN, "GROUPS": fp8_rows.TILE // GROUP, "GROUP": GROUP, "COMPILED": True}
    of_m, kernel = {"m": "i32"}, fp8_rows.quantize_groups_kernel
    yield Kernel("FP8, groups", kernel, types | of_m, constants, frozenset(of_m), loads=CELLS)
    for group in (0, GROUP):
        yield fp8_row(group)
        yield fp8_gates(group)
        for block in fp8_gemm.BLOCKS:
            yield fp8_rows_of(block, group)


def fp8_row(group: int) -> Kernel:
    strip = fp8_gemv.choose_strip(FFN)
    constants = strip.constants(FFN, group, pitch_of(FFN, group)) | {"COMPILED": True}
    types = pointers("x", codes="*fp8e4nv", scales="*fp32", out="*bf16", n="i32")
    name = f"FP8, one row, groups of {group}"
    return Kernel(name, fp8_gemv.fp8_gemv_kernel, types, constants, num_warps=strip.num_warps, loads=CELLS)


def fp8_gates(group: int) -> Kernel:
    strip = fp8_gemv.GATED_STRIP
    constants = strip.constants(HIDDEN, group, pitch_of(HIDDEN, group)) | {"FFN_SIZE": FFN, "ACTIVATION": "silu"}
    types = pointers("x", codes="*fp8e4nv", scales="*fp32", out="*bf16")
    return Kernel(
        f"FP8, gates of one row, groups of {group}",
        fp8_gemv.fp8_gated_gemv_kernel,
        types,
        constants | {"COMPILED": True},
        num_warps=strip.num_warps,
        loads=CELLS,
    )


def fp8_rows_of(block: int, group: int) -> Kernel:
    tile = fp8_gemm.choose_tile(block, HIDDEN, group)
    types = {"x": "*fp8e4nv", "x_scales": "*fp32", "codes": "*fp8e4nv", "scales": "*fp32", "out": "*bf16"}
    return Kernel(
        f"FP8, {block} rows, groups of {group}",
        fp8_gemm.fp8_gemm_kernel,
        types | {"m": "i32", "n": "i32", "out_stride": "i32"},
        tile.constants(block, FFN) | {"GROUP": group, "PITCH": pitch_of(FFN, group), "COMPILED": True},
        frozenset({"m"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=COPIES,
    )


def integers(name: str, layout: IntegerLayout, m: int) -> Kernel:
    tile = integer_gemm.choose_tile(m, HIDDEN, HIDDEN, layout, torch.bfloat16)
    factors = "*i32" if layout.is_half else "*fp32"
    types = {"x": "*bf16", "words": "*i16", "scales": factors} | ({"mins": factors} if layout.has_mins else {})
    types |= {"partials": "*fp32", "counters": "*i32", "out": "*bf16", "m": "i32", "stride": "i32"}
    constants = tile.constants(layout, HIDDEN) | layout.constants() | {"N": HIDDEN, "COMPILED": True}
    return Kernel(
        f"{name}, {m} rows",
        integer_gemm.integer_gemm_kernel,
        types,
        constants | ({} if layout.has_mins else {"mins": None}),
        frozenset({"m"}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=COPIES,
    )


def widening(name: str, layout: IntegerLayout) -> Kernel:
    types = {"words": "*i16", "scales": "*i32" if layout.is_half else "*fp32", "out": "*bf16"}
    types |= {"first": "i32", "num_rows": "i32"}
    constants: dict[str, Any] = {"N": HIDDEN, "K": HIDDEN, "EVEN": True, "BLOCK": integer_matrix.WIDEN_ROWS}
    constants |= {"mins": None, "ids": None, "HAS_IDS": False} | layout.constants()
    any_number = frozenset({"first", "num_rows"})
    return Kernel(name, integer_matrix.widen_kernel, types, constants, any_number, loads=CELLS, stores=CELLS)


def all_integers() -> Iterator[Kernel]:
    awq = IntegerLayout(bits=4, part=32, group=128, zero=8, is_half=False, has_mins=False)
    q4_k = IntegerLayout(bits=4, part=32, group=32, zero=0, is_half=False, has_mins=True)
    q8_0 = IntegerLayout(bits=8, part=32, group=32, zero=0, is_half=True, has_mins=False)
    q6_k = IntegerLayout(bits=8, part=16, group=16, zero=0, is_half=False, has_mins=False)
    for m in (1, 16, 64):
        yield integers("int4, groups of 128", awq, m)
    yield integers("int4 with mins, groups of 32", q4_k, 1)
    yield integers("int8, groups of 32", q8_0, 1)
    yield integers("int8, groups of 16", q6_k, 1)
    yield widening("int4, widened", awq)
    yield widening("int8, widened", q8_0)


def kernels() -> Iterator[Kernel]:
    yield rowwise("norm", norms.rms_norm_kernel, pointers("x weight out", eps="fp32"))
    types = pointers("x delta weight out", eps="fp32")
    yield rowwise("norm of a sum", norms.add_rms_norm_kernel, types)
    yield heads()
    yield activation("SiLU", "silu")
    yield activation("GELU", "gelu_tanh")
    yield activation("clamped SwiGLU", "clamped_swiglu")
    yield fixed("few rows", 1)
    yield fixed("many rows", 4096)
    yield skinny("of 2048 rows", 2048, HIDDEN)
    yield skinny("of 4096 rows", HIDDEN, FFN)
    yield skinny("of 8192 rows", 8192, 8192)
    yield skinny("of a vocabulary", 128_256, HIDDEN)
    yield gates("of 14,336 pairs", FFN, "silu")
    yield gates("of 4096 pairs", 4096, "gelu_tanh")
    yield from experts()
    yield from all_integers()
    yield from adapters()
    yield from fp8()
