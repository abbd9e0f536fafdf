"""Sets of page hashes: 11 to 22 bytes a hash where Python's own take 100, and one call to look in all of them.

The tables are numpy arrays, and the C functions (`page_set.c`) work on nothing else. They keep the GIL: they take
microseconds, and a thread that waits for the GIL would keep it for milliseconds.
Where a hash lies is a secret of the process: else a client could choose prompts whose hashes lie together, and each
look at one would walk past all.
The hash 0 counts as another fixed one: no more than a collision, which any two hashes may have.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from diptych.common.arrays import U64
from diptych.common.native import build_library, declare

MIN_SLOTS: Final = 64
MAX_FILL: Final = 0.75  # of the slots; beyond it probing gets slow
MIN_FILL: Final = 0.125

Hashes: TypeAlias = Sequence[int] | U64

_SIGNATURES: Final[dict[str, tuple[type | None, list[type]]]] = {
    **dict.fromkeys(("add", "add_chain", "remove"), (c_int64, [c_void_p, c_uint64, c_void_p, c_int64])),
    "scatter": (None, [c_uint64, c_uint64]),
    "prefix_lens": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
}


class PageSet:
    """A set of page hashes that grows and shrinks."""

    def __init__(self) -> None:
        self._library = load()
        self._len = 0
        self._use(np.zeros(MIN_SLOTS, np.uint64))

    def __len__(self) -> int:
        return self._len

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    @property
    def place(self) -> tuple[int, int]:
        """Where the table lies, up to the next change, and the mask of its slots."""
        return self._address, self._mask

    def add(self, hashes: Hashes) -> None:
        self._make_room(len(hashes))
        self._len += self._library.page_set_add(self._address, self._mask, _packed(hashes), len(hashes))

    def add_chain(self, chain: Hashes) -> None:
        """Add a prompt's hashes. One that has a hash must have all before it: what is known costs nothing."""
        self._make_room(len(chain))
        self._len += self._library.page_set_add_chain(self._address, self._mask, _packed(chain), len(chain))

    def remove(self, hashes: Hashes) -> None:
        """Take out those that are there."""
        self._len -= self._library.page_set_remove(self._address, self._mask, _packed(hashes), len(hashes))
        if self._len < MIN_FILL * len(self._table) > MIN_FILL * MIN_SLOTS:
            self._resize(self._len)

    def sample(self, parts: int) -> U64:
        """Return about one in `parts` hashes, the same of all sets of this process, but for a few; of 1 part all.

        Where a hash lies follows from its highest bits once they are scattered: a sample is the beginning of a table.
        """
        begin = self._table[: len(self._table) // parts]
        used: U64 = begin[begin != 0]
        return used

    def hashes(self) -> U64:
        """Return all, in no order."""
        used: U64 = self._table[self._table != 0]
        return used

    def _make_room(self, num_new: int) -> None:
        if self._len + num_new > MAX_FILL * len(self._table):
            self._resize(self._len + num_new)

    def _resize(self, num_hashes: int) -> None:
        """Make room for `num_hashes`: at least half of `MAX_FILL` is then in use."""
        old = self.hashes()
        self._use(np.zeros(max(MIN_SLOTS, 1 << int(num_hashes / MAX_FILL).bit_length()), np.uint64))
        self._library.page_set_add(self._address, self._mask, old.ctypes.data, len(old))

    def _use(self, table: U64) -> None:
        self._table = table
        self._address, self._mask = table.ctypes.data, len(table) - 1


def prefix_lens(sets: Sequence[PageSet], chain: Hashes, groups: Sequence[int] = ()) -> list[int]:
    """Return how many leading hashes of a chain each set has. One that has a hash must have all before it.

    `groups`: of the sets, each its own without. Those of a group stand together, and have parts of a chain one behind
    the other: the length of each counts from the beginning of the chain.
    """
    places = array("Q", [word for pages in sets for word in pages.place])
    lens = array("q", bytes(8 * len(sets)))  # small arrays of this kind cost a tenth of numpy's
    numbers = array("q", groups) if groups else None
    load().page_set_prefix_lens(
        *(places.buffer_info()[0], numbers and numbers.buffer_info()[0], len(sets)),
        *(_packed(chain), len(chain), lens.buffer_info()[0]),
    )
    return lens.tolist()


def _packed(hashes: Hashes) -> bytes:
    """Return hashes as the C functions read them: a copy is made in a tenth of the time that numpy takes to say where
    an array lies.
    """
    flat = np.asarray(hashes, np.uint64) if isinstance(hashes, np.ndarray) else array("Q", hashes)
    return flat.tobytes()


def build() -> Path:
    """Compile the library, unless that was done before."""
    return build_library(Path(__file__).with_suffix(".c"), flags=("-std=c11",))


@functools.cache
def load() -> ctypes.PyDLL:
    """Return the library, compiling it at the first call on this machine. Raises `ConfigError` without a compiler."""
    library = declare(ctypes.PyDLL(str(build())), "page_set", _SIGNATURES)
    library.page_set_scatter(secrets.randbits(64), secrets.randbits(64))
    return library
