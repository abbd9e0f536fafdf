"""How a program that has a whole row in registers shares it among its warps."""

from __future__ import annotations

from typing import Final

LARGEST_ROW: Final = 32_768  # numbers: 32 a thread of the largest program
NUMBERS_A_WARP: Final = 512  # 16 a thread: two loads of 16 bytes are on their way


def warps(columns: int) -> int:
    """How many warps share a row of so many numbers, a power of 2."""
    return min(32, max(1, columns // NUMBERS_A_WARP))
