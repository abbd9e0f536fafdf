"""The tiles that might be good for a product of few rows with a weight, compiled by all cores at once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from triton.runtime.errors import OutOfResources

from diptych.kernels.gpu.layers.dot_rows import Tile
from diptych.kernels.gpu.layers.skinny_gemm import skinny_gemm

WAITING_NBYTES: Final = (72 << 10, 108 << 10, 216 << 10)  # of shared memory: 3, 2 and 1 programs fit
MAX_COMPILERS: Final = 16
ROWS: Final = 1024  # of a weight to compile with: the kernel is the same for any multiple of 16

Choice = tuple[Tile, int]  # and the columns of the weight


def tiles(k: int) -> Iterator[Tile]:
    """Yield what might be good for a weight of `k` columns."""
    seen = set()
    for block_n, block_k, waiting, num_warps in itertools.product(
        (16, 32, 64, 128), (128, 256, 512), WAITING_NBYTES, (4, 8)
    ):
        num_stages = 1 + waiting // (2 * (16 + block_n) * block_k)  # one less than that is in shared memory
        tile = Tile(block_n, block_k, num_stages, num_warps)
        if 3 <= num_stages <= 10 and k % block_k == 0 and tile not in seen:
            seen.add(tile)
            yield tile


def compile_all(choices: Iterable[Choice]) -> None:
    """Put the kernels into Triton's cache on disk, where this process finds them."""
    todo = list(dict.fromkeys(choices))
    count = min(MAX_COMPILERS, os.cpu_count() or 1, len(todo))
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        for _ in pool.imap_unordered(_compile, todo):
            pass


def _compile(choice: Choice) -> None:
    tile, k = choice
    x, weight, out = (
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((1, k), (ROWS, k), (1, ROWS))
    )
    try:
        skinny_gemm(x, weight, out, tile)
    except OutOfResources:
        return  # it will be so for any weight
