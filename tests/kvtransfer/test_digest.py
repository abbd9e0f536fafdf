"""The reference digest: what it must not depend on, and what it must notice."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from diptych.kvtransfer.digest import add_digests, digest_bytes

DATA = random.Random(1).randbytes(4096)


def test_the_digest_of_known_words_is_known() -> None:
    assert digest_bytes(np.arange(4, dtype="<u8").view(np.uint8), 1 << 40) == 0xD5D2_7AAA_BBEC_8175


def test_however_it_is_cut_the_sum_is_the_same() -> None:
    cuts = [0, 8, 512, 520, 4000, 4096]
    parts = [digest_bytes(DATA[a:b], 64 + a) for a, b in itertools.pairwise(cuts)]
    assert add_digests(*reversed(parts)) == digest_bytes(DATA, 64)


@pytest.mark.parametrize("bit", [0, 7, 63])
def test_a_flipped_bit_anywhere_changes_it(bit: int) -> None:
    whole = digest_bytes(DATA, 0)
    for word in range(len(DATA) // 8):
        damaged = bytearray(DATA)
        damaged[8 * word + bit // 8] ^= 1 << bit % 8
        assert digest_bytes(bytes(damaged), 0) != whole


def test_the_same_bytes_in_another_place_change_it() -> None:
    assert digest_bytes(DATA, 0) != digest_bytes(DATA, 4096)
    swapped = DATA[8:16] + DATA[:8] + DATA[16:]
    assert digest_bytes(swapped, 0) != digest_bytes(DATA, 0)


def test_the_same_change_twice_does_not_cancel() -> None:
    """As flipped signs do in a plain sum."""
    words = np.frombuffer(DATA, "<u8")
    whole = digest_bytes(DATA, 0)
    for other in range(1, len(words)):
        damaged = words.copy()
        damaged[[0, other]] ^= np.uint64(1 << 63)
        assert digest_bytes(damaged.view(np.uint8), 0) != whole
