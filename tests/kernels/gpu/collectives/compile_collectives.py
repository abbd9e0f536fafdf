"""Sums over GPUs, for `test_compile.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ahead_of_time import Kernel

from diptych.kernels.gpu.collectives import expert_exchange
from diptych.kernels.gpu.collectives.expert_exchange import ExchangeShape, Form
from diptych.kernels.gpu.collectives.meeting import flags_nbytes
from diptych.kernels.gpu.collectives.one_shot import PROGRAMS, REGION_NBYTES, one_shot_kernel


def one_shot(name: str, size: int, ranks: int, num_warps: int, *, norms: bool) -> Kernel:
    types = dict.fromkeys(("x", "residual", "weight", "out"), "*bf16")
    types |= {"eps": "fp32", "num_tiles": "i32", "addresses": "*i64", "rank": "i32", "calls": "*i32", "late": "*i32"}
    types["max_polls"] = "i32"
    constants = {"SIZE": size, "COLUMNS": 1 << (size - 1).bit_length(), "RANKS": ranks, "NUM_PLACES": PROGRAMS}
    constants |= {"REGION": REGION_NBYTES, "FLAGS": flags_nbytes(ranks, PROGRAMS), "NORMS": norms, "TRAPS": True}
    any_number = frozenset({"num_tiles", "rank", "max_polls"})
    wide = frozenset({"v4.b32"})
    return Kernel(name, one_shot_kernel, types, constants, any_number, num_warps=num_warps, loads=wide)


SHAPE = ExchangeShape(2, 128, 8, 7168, 2, 4096)  # that of DeepSeek V3, on two GPUs


def exchange(name: str, function: Any, types: dict[str, str], places: dict[str, int], form: Form) -> Kernel:
    types |= dict.fromkeys(("num_rows", "bound"), "i32") | {"addresses": "*i64", "rank": "i32"}
    types |= {"calls": "*i32", "late": "*i32", "max_polls": "i32"}
    constants = {"SIZE": 7168, "COLUMNS": 8192, "CHOICES": 8, "ROUTE": 8, "ROOM": 128, "RANKS": 2, "TRAPS": True}
    constants |= places | {"NUM_PLACES": expert_exchange.MOST_PROGRAMS}
    any_number = frozenset({"before", "num_rows", "bound", "rank", "max_polls"}) & {*types}
    wide = frozenset({"v4.b32"})
    return Kernel(name, function, types, constants, any_number, num_warps=form.num_warps, loads=wide)


def kernels() -> Iterator[Kernel]:
    sent = {"x": "*bf16", "chosen": "*i64", "shares": "*bf16", "places": "*i32", "num_copies": "*i32", "asked": "*i32"}
    yield exchange(
        "dispatch",
        expert_exchange.dispatch_kernel,
        sent | {"num_tokens": "*i32", "before": "i32"},
        {"ROUTES": SHAPE.routes_nbytes, "ROUTES_AT": SHAPE.flags_nbytes, "TOKENS_AT": SHAPE.tokens_at, "MOST": 2},
        expert_exchange.DISPATCH,
    )
    for name, form in (("combine", expert_exchange.COMBINE), ("combine, in segments", Form(256, 8, 2, 4))):
        yield exchange(
            name,
            expert_exchange.combine_kernel,
            {"results": "*bf16", "received": "*i32", "asked": "*i32", "out": "*bf16"},
            {"FLAGS_AT": SHAPE.flags_nbytes // 2, "RESULTS_AT": SHAPE.results_at}
            | {"ROWS": form.rows, "SEGMENT": form.segment},
            form,
        )
    yield one_shot("one-shot sum", 1024, 2, 4, norms=False)
    yield one_shot("one-shot sum, large", 8192, 2, 32, norms=False)
    yield one_shot("one-shot sum of eight", 1792, 8, 8, norms=False)
    yield one_shot("one-shot sum and norm", 4096, 2, 8, norms=True)
    yield one_shot("one-shot sum and norm, odd width", 7168, 4, 16, norms=True)
