"""`page_hash.page_hashes` in C, for a router that names the pages of every prompt: a quarter of the time, and the same.
Names the blocks of prompts that come as text, too: those names are the router's own.

Tests hold the two together. Workers name few pages at a time, for which a call of C would not pay.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diptych.common import native
from diptych.common.arrays import U64
from diptych.common.native import build_library
from diptych.generation.page_hash import root_hash

U32 = npt.NDArray[np.uint32]


def page_hashes(token_ids: U32, page_size: int, extra_key: bytes = b"") -> U64:
    """Return the hashes of the full pages of a prompt."""
    assert token_ids.dtype == np.uint32, token_ids.dtype
    num_pages = len(token_ids) // page_size
    # small arrays of this kind cost a tenth of numpy's
    hashes, page = array("Q", bytes(8 * num_pages)), array("Q", bytes(8 * page_size))
    load().page_chain(
        root_hash(extra_key),
        token_ids.tobytes(),  # a copy takes less than to ask numpy where they lie
        num_pages,
        page_size,
        page.buffer_info()[0],
        hashes.buffer_info()[0],
    )
    return np.frombuffer(hashes, np.uint64).copy()  # a view would keep three objects more with each prompt that is kept


def text_hashes(utf8: bytes, block_bytes: int, extra_key: bytes = b"") -> U64:
    """Return the hashes of the full blocks of a text, of 4 bytes or a multiple of that: as if each 4 were a token."""
    return page_hashes(np.frombuffer(utf8[: len(utf8) // 4 * 4], "<u4"), block_bytes // 4, extra_key)


def build() -> Path:
    """Compile the library, unless that was done before."""
    source = Path(__file__).with_suffix(".c")
    return build_library(source, header_dirs=[Path(native.__file__).parent], flags=("-std=gnu11", "-march=native"))


@functools.cache
def load() -> ctypes.PyDLL:
    """Return the library, compiling it at the first call on this machine. Raises `ConfigError` without a compiler."""
    library = ctypes.PyDLL(str(build()))
    library.page_chain.restype = None
    library.page_chain.argtypes = [c_uint64, c_void_p, c_int64, c_int64, c_void_p, c_void_p]
    return library
