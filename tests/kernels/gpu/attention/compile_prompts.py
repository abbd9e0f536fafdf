"""Prompt attention on Hopper, and what expands FP8 for it, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ahead_of_time import Kernel

from diptych.kernels.gpu.attention.expand_pages import TOKENS, expand_pages_kernel
from diptych.kernels.gpu.attention.prompt_attention import BOX, TILE
from diptych.kernels.gpu.attention.prompt_attention_kernel import LAYOUT, prompt_attention_kernel

GROUP: Final = 4
OF_A_STEP: Final = frozenset({"num_items", "table_stride", "page_table", "seq_lens", "extend_starts", "work"})


def prompts(name: str, head_dim: int, dtype: str, page_size: int) -> Kernel:
    types = {"out": f"*{dtype}", "q": f"*{dtype}", "kv": f"tensordesc<{dtype}[{page_size},{BOX}],{LAYOUT!r}>"}
    types |= dict.fromkeys(("page_table", "seq_lens", "extend_starts", "work"), "*i32")
    strides = ("out_token", "out_head", "q_token", "q_head", "table")
    types |= {"num_items": "i32", **{f"{each}_stride": "i32" for each in strides}, "factor": "fp32", "v_scale": "fp32"}
    constants = {
        "GROUP": GROUP,
        "KEYS": TILE.keys,
        "DIM": head_dim,
        "STAGES": TILE.stages,
        "PAGE_SIZE": page_size,
        "PAGE_ROWS": 64 * page_size,
        "VALUE_ROWS": page_size,
        "REGISTERS": TILE.registers,
        "COPY_REGISTERS": TILE.copy_registers,
    }
    return Kernel(
        name,
        prompt_attention_kernel,
        types,
        constants,
        OF_A_STEP,
        num_warps=4,
        loads=frozenset({"async 16"}),
        stores=frozenset({"v4.b32"}),
    )


def expand(name: str) -> Kernel:
    types = {"pool": "*bf16", "kv": "*fp8e4nv"} | dict.fromkeys(("page_table", "new_table", "seq_lens"), "*i32")
    types |= {"table_stride": "i32", "new_table_stride": "i32"}
    constants = {"WIDTH": 1024, "COLUMNS": 1024, "PAGE_SIZE": 16, "PAGE_STRIDE": 1 << 20, "VALUE_STRIDE": 1 << 14}
    constants |= {"SLOT_STRIDE": 1024, "NEW_PAGE_SIZE": TILE.keys, "TOKENS": TOKENS}
    of_a_step = frozenset({*types} - {"pool", "kv"})
    return Kernel(
        name,
        expand_pages_kernel,
        types,
        constants,
        of_a_step,
        loads=frozenset({"v4.b32"}),
        stores=frozenset({"v4.b32"}),
    )


def kernels() -> Iterator[Kernel]:
    yield prompts("prompt attention", 128, "bf16", 16)
    yield prompts("prompt attention, heads of 64, expanded pages", 64, "fp16", TILE.keys)
    yield expand("expanded pages")
