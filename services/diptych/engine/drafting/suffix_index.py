"""Where a text went on before as it ends now: an index of tokens, and readers that guess by it.

The tables are numpy arrays, and the C functions (`suffix_index.c`) work on nothing else. They keep the GIL: they take
microseconds, and a thread that waits for the GIL would keep it for milliseconds.

The idea is of prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) and of SuffixDecoding (NeurIPS
2025, https://arxiv.org/abs/2411.04975), which guesses by the counts in a suffix tree. Here the newest places of each
context stand for the tree: 16 to 32 bytes a token, no walk to the root for each token, and the oldest ones fall out.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import Structure, addressof, c_double, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Final

import numpy as np

from diptych.common.arrays import I64
from diptych.common.native import build_library, declare
from diptych.engine.drafting.source import NO_GUESS, Guess

MAX_GUESS: Final = 64  # tokens
MIN_CAPACITY: Final = 64  # tokens
NO_TOKEN: Final = np.array([-1], np.int64)  # between texts: nothing is compared across it

_OBJECT_BYTES: Final = 1024  # of an index beside its tables: 760 were measured, and an entry in its owner's
_NUM_ORDERS: Final = 2  # as in suffix_index.c
_SIGNATURES: Final[dict[str, tuple[type | None, list[type]]]] = {
    "take": (None, [c_void_p, c_void_p, c_int64]),
    "guess": (c_int64, [c_void_p, c_void_p, c_int64, c_int64]),
}


class _Index(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("newest", c_void_p),
        ("older", c_void_p),
        ("capacity", c_uint32),
        ("size", c_uint32),
        ("held", c_uint32),
    )


class _Reader(Structure):
    _fields_ = (
        ("text", c_void_p),
        ("at", c_uint32),
        ("seen", c_uint32),
        ("is_own", c_uint32),
        ("guess", c_void_p),
        ("chances", c_void_p),
    )


class SuffixIndex:
    """Holds the newest tokens of what it has taken: a text, or several with `NO_TOKEN` between them."""

    def __init__(self, min_tokens: int) -> None:
        """Make room for so many tokens at least, and at most twice as many."""
        self.capacity = capacity_for(min_tokens)
        self.size = 0  # tokens taken so far
        self._tokens = np.empty(self.capacity, np.int32)
        self._newest = np.zeros((_NUM_ORDERS, self.capacity // 2), np.uint32)
        self._older = np.empty((_NUM_ORDERS, self.capacity), np.uint32)
        places = (array.ctypes.data for array in (self._tokens, self._newest, self._older))
        self._fields = _Index(*places, self.capacity)
        self.address = addressof(self._fields)
        self._take = load().suffix_index_take

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._newest.nbytes + self._older.nbytes + _OBJECT_BYTES

    @property
    def is_full(self) -> bool:
        """Whether the oldest tokens give way to new ones."""
        return self.size >= self.capacity

    @property
    def held(self) -> I64:
        """The newest tokens, oldest first; below zero where there is none."""
        start = max(0, self.size - self.capacity)
        return self._tokens[np.arange(start, self.size) % self.capacity].astype(np.int64)

    def append(self, tokens: I64) -> None:
        """Append tokens; the oldest ones give way. Those below zero count as `NO_TOKEN`."""
        assert tokens.dtype == np.int64
        assert tokens.flags.c_contiguous
        self._take(self.address, tokens.ctypes.data, len(tokens))
        self.size += len(tokens)


class SuffixReader:
    """Guesses how one text goes on, by an index of it, or of others."""

    def __init__(self, text: I64, *, is_own: bool) -> None:
        """`is_own`: indexes have taken this text from its beginning, and nothing else."""
        assert text.dtype == np.int64
        assert text.flags.c_contiguous
        self._text = text  # keeps the memory
        self._guess = (c_int32 * MAX_GUESS)()
        self._chances = (c_double * MAX_GUESS)()
        self._fields = _Reader(text.ctypes.data, 0, 0, is_own, addressof(self._guess), addressof(self._chances))
        self._address = addressof(self._fields)
        self._call = load().suffix_index_guess

    def guess(self, index: SuffixIndex, text_len: int, at_most: int) -> Guess:
        """Return how the text may go on behind so many of its tokens."""
        num_guessed = self._call(index.address, self._address, text_len, min(at_most, MAX_GUESS))
        return Guess(tuple(self._guess[:num_guessed]), tuple(self._chances[:num_guessed])) if num_guessed else NO_GUESS


def capacity_for(num_tokens: int) -> int:
    return max(MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())


def nbytes_for(num_tokens: int) -> int:
    """Return what an index that makes room for so many tokens holds."""
    return capacity_for(num_tokens) * (4 + 4 * _NUM_ORDERS + 2 * _NUM_ORDERS) + _OBJECT_BYTES


def build() -> Path:
    """Compile the library, unless that was done before."""
    return build_library(Path(__file__).with_suffix(".c"), flags=("-std=c11",))


@functools.cache
def load() -> ctypes.PyDLL:
    """Return the library, compiling it at the first call on this machine. Raises `ConfigError` without a compiler."""
    return declare(ctypes.PyDLL(str(build())), "suffix_index", _SIGNATURES)
