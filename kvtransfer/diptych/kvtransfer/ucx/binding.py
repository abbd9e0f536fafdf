"""The C shim's functions in Python: types only. Everything here has its comment in `shim.h`."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Final

from diptych.common.native import build_library
from diptych.kvtransfer.ucx import loader

LINK_UP: Final = 1
LINK_DOWN: Final = 2
NOTE: Final = 3
OP_DONE: Final = 4

UNKNOWN_PEER: Final = -1001
QUEUE_FULL: Final = -1002
OUT_OF_RANGE: Final = -1003


class Options(Structure):
    """`kvt_options_t`"""

    _fields_ = (
        ("instance_id", c_uint64),
        ("max_operations", c_uint64),
        ("max_waiting_notes", c_uint64),
        ("max_posted_bytes", c_uint64),
        ("heartbeat_s", c_double),
        ("silence_s", c_double),
        ("connect_s", c_double),
    )


class Event(Structure):
    """`kvt_event_t`"""

    kind: int
    status: int
    peer: int
    op: int
    length: int
    data: int | None
    reason: bytes | None
    _fields_ = (
        ("kind", c_int32),
        ("status", c_int32),
        ("peer", c_uint64),
        ("op", c_uint64),
        ("length", c_uint64),
        ("data", c_void_p),
        ("reason", c_char_p),
    )


_SIGNATURES: Final = {
    "kvt_open": (c_void_p, (POINTER(Options), c_char_p, POINTER(c_int))),
    "kvt_allocate": (c_int, (c_void_p, c_size_t, POINTER(c_void_p))),
    "kvt_start": (c_int, (c_void_p,)),
    "kvt_worker_address": (c_int64, (c_void_p, c_void_p, c_size_t)),
    "kvt_pool_key": (c_int64, (c_void_p, c_void_p, c_size_t)),
    "kvt_connect": (c_int, (c_void_p, c_uint64, c_char_p, c_size_t, c_char_p, c_size_t, c_uint64, c_uint64)),
    "kvt_disconnect": (None, (c_void_p, c_uint64)),
    "kvt_write": (c_int64, (c_void_p, c_uint64, c_size_t, c_size_t, c_void_p, c_void_p, c_char_p, c_size_t)),
    "kvt_poll": (c_size_t, (c_void_p, POINTER(Event), c_size_t)),
    "kvt_descriptor": (c_int, (c_void_p,)),
    "kvt_release": (None, (c_void_p,)),
    "kvt_stale_messages": (c_uint64, (c_void_p,)),
    "kvt_describe": (c_int64, (c_void_p, c_uint64, c_void_p, c_size_t, POINTER(c_uint64), POINTER(c_double))),
    "kvt_close": (None, (c_void_p,)),
    "kvt_status_string": (c_char_p, (c_int,)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Load UCX and the shim, building the shim if this machine has none yet. Raises `ConfigError`."""
    loader.load()
    shim = ctypes.CDLL(str(build()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(shim, name)
        function.restype, function.argtypes = result, arguments
    return shim


def build() -> Path:
    """Compile the shim, unless that was done before."""
    source = Path(__file__).with_name("shim.c")
    return build_library(source, include_dirs=[loader.include_folder()], flags=["-pthread"])
