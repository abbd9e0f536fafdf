"""The names of ranks. Each rank of an instance links to several of another, so it has one of its own for transfers."""

from __future__ import annotations

from typing import Final

_STEP: Final = 0x9E37_79B9_7F4A_7C15  # odd: no two ranks of an instance have one id


def rank_id(instance_id: int, rank: int) -> int:
    """Return a 64-bit id that is never 0; rank 0 has the instance's own, which notes are addressed with."""
    return (instance_id + rank * _STEP) % 2**64 or _STEP >> 1
