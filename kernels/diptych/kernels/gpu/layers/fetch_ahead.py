"""Has the L2 cache hold, by the time that it is needed, where the next product's weight begins.

Between two products of a decode step memory idles: the last programs of one end, a kernel starts, a norm or attention
waits for latencies, a kernel starts again. So each program of a product, when it has read its part of its own weight,
asks for a part of the next one: by instructions that wait for nothing and keep no register. What is asked for is every
other piece of the first columns of each row, which is what programs of the next product read first.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.gpu.grid import cdiv

LINE: Final = 128  # bytes that are asked for by one instruction
PIECE: Final = tl.constexpr(2)  # lines that follow each other
SPREAD: Final = 2  # of so many pieces of a row one is asked for: what reads them finds the others in memory meanwhile
AT_ONCE: Final = tl.constexpr(512)  # lines of one turn of a program
FETCHED_NBYTES: Final = 12 << 20  # of a weight: what memory gives in 3 us, and a quarter of an H200's cache


def lines_of(weight: Tensor | None, nbytes: int = FETCHED_NBYTES) -> int:
    """Return how many lines of each row of a contiguous `weight` `[n, k]` are asked for; 0 of none."""
    if weight is None or weight.shape[1] * weight.itemsize % LINE:
        return 0
    return min(weight.shape[1] * weight.itemsize // LINE // SPREAD, cdiv(nbytes, len(weight) * LINE))


def ahead_constants(weight: Tensor | None) -> dict[str, int | bool]:
    """Return what a kernel is compiled with that asks for `weight`."""
    n, k = (0, 0) if weight is None else weight.shape
    is_compiled = not triton.knobs.runtime.interpret
    return {"AHEAD_N": n, "AHEAD_K": k, "LINES": lines_of(weight), "SPREAD": SPREAD, "COMPILED": is_compiled}


@triton.jit
def fetch(
    weight,
    num_rows,
    program,
    num_programs,
    K: tl.constexpr,
    LINES: tl.constexpr,
    SPREAD: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Ask for this program's part of `LINES` lines of each row of `weight` `[num_rows, K]`."""
    if COMPILED:
        IN_LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        num_lines = num_rows * LINES
        share = tl.cdiv(num_lines, num_programs)
        end = tl.minimum((program + 1) * share, num_lines)
        for start in tl.range(program * share, end, AT_ONCE):
            line = tl.minimum(start + tl.arange(0, AT_ONCE), end - 1)
            column = (line % LINES // PIECE * SPREAD * PIECE + line % LINES % PIECE) * IN_LINE
            place = weight + (line // LINES).to(tl.int64) * K + column
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
            )
