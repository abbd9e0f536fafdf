"""The digest of page bytes: what the sender of pages and their receiver compare. This is its reference, in numpy.

A 64-bit sum over the 8-byte little-endian words of what was written, each mixed with its offset in the *target* pool.
A sum knows no order: neither how pages were cut into pieces, nor how layers or ranks shared them. The mix is a
bijection of the word, so one changed word always changes the sum; bytes in a wrong place do because of the offset. Not
against an adversary. The same in C (`ucx/shim/copy/digest.c`) and in the GPU kernels; tests compare them with this one.

    h = word ^ (offset * KEY_STEP + KEY_START)
    h *= MIX_1;  h ^= h >> 32;  h *= MIX_2;  h ^= h >> 29
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

KEY_STEP: Final = 0x9E37_79B9_7F4A_7C15
KEY_START: Final = 0xD6E8_FEB8_6659_FD93
MIX_1: Final = 0x9E37_79B1_85EB_CA87
MIX_2: Final = 0xC2B2_AE3D_27D4_EB4F
WORD_NBYTES: Final = 8
MASK: Final = 2**64 - 1

_STEP, _START, _MIX_1, _MIX_2 = (np.uint64(constant) for constant in (KEY_STEP, KEY_START, MIX_1, MIX_2))


def digest_bytes(data: memoryview | bytearray | bytes | npt.NDArray[np.uint8], offset: int) -> int:
    """Return the digest of `data` as it lies at byte `offset` of the target pool. Both are multiples of 8 bytes."""
    words = np.frombuffer(data, dtype="<u8")
    offsets = np.arange(len(words), dtype=np.uint64) * np.uint64(WORD_NBYTES) + np.uint64(offset)
    mixed = (words ^ (offsets * _STEP + _START)) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _MIX_2
    return int((mixed ^ (mixed >> np.uint64(29))).sum(dtype=np.uint64))


def add_digests(*digests: int) -> int:
    """Return the digest of all of what these are digests of."""
    return sum(digests) & MASK
