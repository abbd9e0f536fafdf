"""The kernels of extend attention and of what comes before it, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from ahead_of_time import Kernel

from diptych.kernels.gpu.attention.extend_attention import choose_tile, extend_attention_kernel
from diptych.kernels.gpu.attention.rope_store import rope_store_kernel
from diptych.kernels.gpu.attention.split_extend_attention import (
    ADDED_ROWS,
    add_up_kernel,
    split_extend_attention_kernel,
    split_tile,
)

TYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
GROUP: Final = 4
OF_A_STEP: Final = frozenset({"batch", "table_stride", "page_table", "seq_lens", "extend_starts"})
AHEAD: Final = ("seen_ends", "LOOKS_AHEAD")  # of whole requests' tokens alone


def extend(name: str, head_dim: int, num_tokens: int, q: str, kv: str, **options: Any) -> Kernel:
    types = {"out": f"*{q}", "q": f"*{q}", "kv": f"*{kv}"}
    types["sinks"] = "*fp32"
    types |= dict.fromkeys(("page_table", "seq_lens", "extend_starts", "seen_ends"), "*i32")
    strides = ("out_token", "out_head", "q_token", "q_head", "table")
    types |= {"batch": "i32", **{f"{each}_stride": "i32" for each in strides}}
    types |= dict.fromkeys(("score_factor", "cap_factor", "v_scale"), "fp32")
    tile = choose_tile(num_tokens * GROUP, num_tokens * GROUP, 8, head_dim, TYPES[q])
    constants = {
        "GROUP": GROUP,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "WINDOW": 0,
        "CAPPED": False,
        "SINKS": False,
        "CHUNKED": False,
        "LOOKS_AHEAD": False,
        **options,
    }
    constants |= {"PAGE_STRIDE": 1 << 20, "VALUE_STRIDE": 128 * head_dim, "SLOT_STRIDE": 8 * head_dim}
    constants = {"KV_HEAD_STRIDE": head_dim, "ROWS": tile.rows, "KEYS": tile.keys, "DIMS": head_dim, **constants}
    return Kernel(
        name,
        extend_attention_kernel,
        types,
        constants,
        OF_A_STEP | {"seen_ends"},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        loads=frozenset({"async 16"}),
    )


def split(name: str, head_dim: int, num_tokens: int, q: str, kv: str) -> Kernel:
    """Describe the same of shares: parts are stored beside what is returned."""
    tile = split_tile(num_tokens * GROUP, head_dim, TYPES[q])
    whole = extend(name, head_dim, num_tokens, q, kv, ROWS=tile.rows, KEYS=tile.keys)
    types, constants = (
        {name: said for name, said in each.items() if name not in AHEAD} for each in (whole.types, whole.constants)
    )
    types |= {"part_values": "*fp32", "part_maxima": "*fp32", "part_sums": "*fp32"}
    return replace(
        whole,
        function=split_extend_attention_kernel,
        types=types,
        constants=constants,
        any_number=OF_A_STEP,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def added(name: str, q: str) -> Kernel:
    types = {
        "out": f"*{q}",
        "extend_starts": "*i32",
        **dict.fromkeys(("part_values", "part_maxima", "part_sums"), "*fp32"),
    }
    types |= {**dict.fromkeys(("batch", "num_shares", "out_token_stride", "out_head_stride"), "i32"), "v_scale": "fp32"}
    constants = {"GROUP": GROUP, "HEAD_DIM": 128, "TILE_ROWS": 64, "ROWS": ADDED_ROWS, "DIMS": 128}
    any_number = frozenset({"batch", "num_shares", "extend_starts"})
    return Kernel(name, add_up_kernel, types, constants, any_number, loads=frozenset({"v4.b32"}))


def rope(name: str, kv: str) -> Kernel:
    types = {"qkv": "*bf16", "positions": "*i64", "out_slots": "*i64", "rope_table": "*fp32", "kv": f"*{kv}"}
    types |= {f"{each}_stride": "i32" for each in ("row", "page", "value", "slot", "head")}
    types |= {"k_scale": "fp32", "v_scale": "fp32"}
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "NUM_STATES": 48, "HEAD_DIM": 128}
    constants = {**heads, "ROPE_START": 0, "ROPE_HALF": 64, "PAGE_SIZE": 16}
    constants |= {
        "FP8": kv == "i8",
        "SCALED": False,
        "BY_INSTRUCTION": kv == "i8",
        "ROWS": 32,
        "COLUMNS": 64,
        "REST": 0,
    }
    return Kernel(
        name, rope_store_kernel, types, constants, frozenset({"positions", "out_slots"}), loads=frozenset({"v4.b32"})
    )


def kernels() -> Iterator[Kernel]:
    yield extend("extend attention", 128, 4096, "bf16", "bf16")
    yield extend("extend attention, window and cap", 128, 4096, "bf16", "bf16", WINDOW=4096, CAPPED=True)
    yield extend("extend attention, window and sinks", 64, 4096, "bf16", "bf16", WINDOW=128, SINKS=True)
    yield extend("extend attention, chunks", 128, 4096, "bf16", "bf16", WINDOW=8192, CHUNKED=True)
    yield extend("extend attention, images", 256, 4096, "bf16", "bf16", WINDOW=1024, LOOKS_AHEAD=True)
    yield extend("extend attention, FP8", 128, 4096, "bf16", "fp8e4nv")
    yield extend("extend attention, heads of 256", 256, 4096, "bf16", "bf16")
    yield extend("extend attention, heads of 512", 512, 4096, "bf16", "bf16")
    yield extend("extend attention, heads of 512 in float32", 512, 4096, "fp32", "fp32")
    yield extend("extend attention, heads of 512, few rows", 512, 1, "bf16", "bf16")
    yield extend("extend attention, few rows", 64, 1, "bf16", "bf16")
    yield split("shares of extend attention", 128, 64, "bf16", "bf16")
    yield split("shares of extend attention, FP8", 128, 64, "bf16", "fp8e4nv")
    yield split("shares of extend attention, few rows", 128, 4, "bf16", "bf16")
    yield split("shares of extend attention, heads of 256", 256, 64, "bf16", "bf16")
    yield added("sum of shares", "bf16")
    yield rope("rope and store", "bf16")
    yield rope("rope and store, FP8", "i8")
