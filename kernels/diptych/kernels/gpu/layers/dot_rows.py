"""The inner loop of products with weights: tiles of rows of both are streamed through shared memory into tensor cores.

Rule: additions are in float32 and in order of the columns, whatever the other rows are; float32 is multiplied as it is,
without tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from diptych.kernels.gpu.grid import cdiv


@dataclass(frozen=True, slots=True)
class Tile:
    """How a weight is shared out and read. What is on its way is `num_stages - 1` stages, in shared memory."""

    block_n: int  # rows of a program
    block_k: int  # columns of a stage
    num_stages: int
    num_warps: int

    def constants(self, block_m: int, k: int) -> dict[str, int]:
        """Return what a kernel is compiled with that multiplies `block_m` rows at once with weights of `k` columns."""
        steps, blocks = cdiv(k, self.block_k), {"BLOCK_M": block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {"K": k, "STEPS": steps, "EVEN": k % self.block_k == 0, **blocks}


@triton.jit
def dot_rows(
    of_x,  # addresses of the first tile, [BLOCK_M, BLOCK_K]
    of_weight,  # [BLOCK_N, BLOCK_K]
    there,  # [BLOCK_M, 1]: which rows of x there are
    column,  # [BLOCK_K]: of the first tile
    K: tl.constexpr,  # columns there are
    STEPS: tl.constexpr,  # of BLOCK_K columns each
    EVEN: tl.constexpr,  # whether all columns of all steps are there
):
    """Return the products `[BLOCK_M, BLOCK_N]` of each row of x with each of the weight."""
    block_k: tl.constexpr = of_x.shape[1]
    total = tl.zeros((of_x.shape[0], of_weight.shape[0]), tl.float32)
    for step in range(STEPS):
        if EVEN:
            rows, weights = tl.load(of_x, mask=there, other=0.0), tl.load(of_weight)
        else:
            inside = (column + step * block_k < K)[None, :]
            rows = tl.load(of_x, mask=there & inside, other=0.0)
            weights = tl.load(of_weight, mask=inside, other=0.0)
        total = tl.dot(rows, weights.T, total, input_precision="ieee")
        of_x += block_k
        of_weight += block_k
    return total
