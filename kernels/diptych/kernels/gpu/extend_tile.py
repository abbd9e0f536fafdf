"""Decides how much of extend attention a program computes at once: a rule of shapes, never a search while serving.

Long prompts get the largest tile whose loop keeps everything in registers and copies two turns ahead. Where that makes
fewer programs than an H200 has multiprocessors, tiles are half as long, two a multiprocessor; a few new tokens get the
smallest that tensor cores take, as memory is what they wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

NUM_SMS: Final = 132  # of an H200


@dataclass(frozen=True, slots=True)
class Tile:
    """How much a program computes at once, and with what."""

    rows: int  # pairs of a token and a query head
    keys: int  # of one turn of its loop
    num_warps: int
    num_stages: int


def choose_tile(num_rows: int, max_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile for `num_rows` pairs of a token and a head of its group, `max_rows` of them of one request."""
    if dtype == torch.float32:
        return Tile(rows=32, keys=32, num_warps=4, num_stages=2)
    if max_rows <= 16:
        return Tile(rows=16, keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)
    if num_kv_heads * -(-num_rows // 128) < NUM_SMS:
        return Tile(rows=64, keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)
    return Tile(rows=128, keys=64 if head_dim <= 128 else 32, num_warps=8, num_stages=3)
