"""One call of a trace: when it comes, how long its prompt and output are, and which blocks its prompt consists of.

A trace holds no text. Equal names at the same place of two prompts mean equal tokens from the beginning to the end of
that block, as in Mooncake's traces; the last block need not be full, and its name then stands for what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import xxhash

from diptych.common.arrays import I64, U64

BLOCK_TOKENS: Final = 512
_ONE: Final = np.uint64(1)
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_GATHER: Final = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))  # undoes it


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A request that is offered to a platform."""

    arrival_s: float  # since the trace began
    prompt_len: int  # tokens, 1 or more
    output_len: int  # tokens, 1 or more
    blocks: U64  # [ceil(prompt_len / 512)] names of the prompt's blocks
    tenant: str = ""
    tier: str = ""  # the named objectives it asks for
    session: str = ""  # the conversation or the agent that it belongs to
    gap_s: float = math.nan  # it comes so long after the end of the call of its session before it; nan: at `arrival_s`
    tool: str = ""  # that its output calls


def names_of(numbers: I64 | U64) -> U64:
    """Return the names of blocks that a trace counts: counts are small and dense, and hashes of pages are not."""
    return (numbers.astype(np.uint64) + _ONE) * _SPREAD


def numbers_of(names: U64) -> U64:
    """Return what `names_of` made the names from. Any other name becomes a number of 64 bits, and back."""
    return names * _GATHER - _ONE


def digest_of(calls: Iterable[Call]) -> str:
    """Return a digest of all that a trace says: equal ones are the same load."""
    digest = xxhash.xxh3_128()
    for call in calls:
        words = (call.arrival_s, call.prompt_len, call.output_len, call.tenant, call.tier, call.session)
        loop = () if math.isnan(call.gap_s) and not call.tool else (call.gap_s, call.tool)
        digest.update(repr(words + loop).encode())
        digest.update(call.blocks.astype("<u8", copy=False).tobytes())
    return digest.hexdigest()


def from_zero(calls: Sequence[Call]) -> list[Call]:
    """Return calls in their order, of which the first comes at 0 s: what was before it is nobody's time."""
    if not calls or not calls[0].arrival_s:
        return list(calls)
    began_s = calls[0].arrival_s
    return [replace(call, arrival_s=round(call.arrival_s - began_s, 6)) for call in calls]
