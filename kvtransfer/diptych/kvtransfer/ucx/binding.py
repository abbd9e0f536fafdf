"""The C shim's functions in Python: types only. Everything here has its comment in `shim/shim.h`."""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from itertools import product
from pathlib import Path
from typing import Final

from diptych.common.native import build_library
from diptych.kernels.page_pack import CELLS, INCLUDE_FOLDER, PackStruct, PartsStruct
from diptych.kvtransfer.ucx import loader

FULL: Final = -1
NO_LINK: Final = -2
OUT_OF_RANGE: Final = -3
TOO_LONG: Final = -4
OUT_OF_MEMORY: Final = -5
NO_PATH: Final = -6
BUSY: Final = -7
DEVICE: Final = -8

SOURCE: Final = Path(__file__).parent / "shim" / "shim_unit.c"
PATHS: Final = ("copy", "mover", "put", "message", "staged")  # by KVT_PATH_*, best first

HANDLE_NBYTES: Final = 64
KEY_NBYTES: Final = 16
DEVICE_KINDS: Final = {"cuda": 1, "emulated": 2}
PACKERS: Final = tuple(product(CELLS, CELLS))  # from which type to which; behind the mover, digester and unpacker
NUM_KERNELS: Final = 3 + len(PACKERS)

LINK_UP: Final = 1
LINK_DOWN: Final = 2
NOTE: Final = 3
OP_DONE: Final = 4


class Options(Structure):
    """`kvt_options`"""

    _fields_ = (
        ("instance_id", c_uint64),
        ("heartbeat_s", c_double),
        ("heartbeat_misses", c_uint32),
        ("connect_timeout_s", c_double),
        ("max_operations", c_uint32),
        ("max_waiting_notes", c_uint32),
        ("with_remote_access", c_int32),
        ("only_granted", c_int32),
        ("key", c_uint8 * KEY_NBYTES),
        ("settings", POINTER(c_char_p)),
    )


class Event(Structure):
    """`kvt_event`"""

    kind: int
    has_digest: int
    digest: int
    peer: int
    op: int
    text: bytes | None
    data: int
    data_len: int
    seconds: float
    _fields_ = (
        ("kind", c_int32),
        ("has_digest", c_int32),
        ("digest", c_uint64),
        ("peer", c_uint64),
        ("op", c_uint64),
        ("text", c_char_p),
        ("data", c_void_p),
        ("data_len", c_uint64),
        ("seconds", c_double),
    )


class Peer(Structure):
    """`kvt_peer`"""

    address: int
    address_len: int
    pool_key: int
    pool_key_len: int
    pool_base: int
    device_handle: int | None
    _fields_ = (
        ("address", c_void_p),
        ("address_len", c_uint64),
        ("pool_key", c_void_p),
        ("pool_key_len", c_uint64),
        ("pool_base", c_uint64),
        ("num_pages", c_uint64),
        ("page_nbytes", c_uint64),
        ("device_handle", c_void_p),
        ("key", c_uint8 * KEY_NBYTES),
    )


class Kernel(Structure):
    """`kvt_kernel`"""

    _fields_ = (
        ("binary", c_char_p),
        ("name", c_char_p),
        ("num_warps", c_uint32),
        ("shared_nbytes", c_uint32),
        ("num_programs", c_uint32),
        ("chunk", c_uint32),
    )


class DeviceOptions(Structure):
    """`kvt_device_options`"""

    _fields_ = (("kind", c_int32), ("ordinal", c_int32), ("kernels", Kernel * NUM_KERNELS))


class Copy(Structure):
    """`kvt_copy`"""

    _fields_ = (
        ("num_pages", c_uint64),
        ("src", c_void_p),
        ("dst", c_void_p),
        ("src_offset", c_uint64),
        ("dst_offset", c_uint64),
        ("nbytes", c_uint64),
        ("pack", POINTER(PackStruct)),
        ("first_tokens", c_void_p),
        ("num_src", c_uint64),
    )


class Operation(Structure):
    """`kvt_operation`"""

    _fields_ = (
        ("num_copies", c_uint64),
        ("copies", POINTER(Copy)),
        ("note", c_char_p),
        ("note_len", c_uint64),
        ("stream", c_uint64),
        ("priority", c_int32),
        ("with_digest", c_int32),
        ("has_digest", c_int32),
        ("digest", c_uint64),
        ("timeout_s", c_double),
    )


class LinkStatus(Structure):
    """`kvt_link_status`"""

    bytes_sent: int
    last_heard_s: float
    rtt_s: float
    in_flight_bytes: int
    queued_bytes: int
    paths: int
    path: int
    lanes: bytes
    _fields_ = (
        ("bytes_sent", c_uint64),
        ("last_heard_s", c_double),
        ("rtt_s", c_double),
        ("in_flight_bytes", c_uint64),
        ("queued_bytes", c_uint64),
        ("paths", c_uint32),
        ("path", c_int32),
        ("lanes", c_char * 256),
    )


_FLAGS: Final = ("-std=gnu11", "-pthread", "-march=native", "-ffp-contract=off")

_SIGNATURES: Final = {
    "kvt_create": (c_void_p, (POINTER(Options), c_char_p, c_size_t)),
    "kvt_allocate": (c_int, (c_void_p, c_uint64, c_uint64, POINTER(c_void_p), c_char_p, c_size_t)),
    "kvt_allocate_on_device": (
        c_int,
        (c_void_p, POINTER(DeviceOptions), c_uint64, c_uint64, POINTER(c_void_p), c_char_p, c_size_t),
    ),
    "kvt_follow": (c_int, (c_void_p, c_uint64)),
    "kvt_copy_page": (c_int, (c_void_p, c_int64, c_void_p, c_int)),
    "kvt_self": (None, (c_void_p, POINTER(Peer))),
    "kvt_own_addresses": (None, (c_char_p, c_size_t)),
    "kvt_connect": (c_void_p, (c_void_p, c_uint64, POINTER(Peer))),
    "kvt_disconnect": (None, (c_void_p,)),
    "kvt_release": (None, (c_void_p,)),
    "kvt_submit": (c_int64, (c_void_p, POINTER(Operation))),
    "kvt_digest_pages": (c_int64, (c_void_p, c_uint64, c_void_p)),
    "kvt_unpack_pages": (c_int64, (c_void_p, c_uint64, c_void_p, c_uint64, POINTER(PartsStruct))),
    "kvt_grant_pages": (c_int, (c_void_p, c_uint64, c_uint64, c_void_p)),
    "kvt_revoke_pages": (c_int, (c_void_p, c_uint64, c_void_p)),
    "kvt_use_path": (c_int, (c_void_p, c_int32)),
    "kvt_poll": (c_int, (c_void_p, POINTER(Event), c_int)),
    "kvt_event_fd": (c_int, (c_void_p,)),
    "kvt_describe": (None, (c_void_p, POINTER(LinkStatus))),
    "kvt_num_dropped_messages": (c_uint64, (c_void_p,)),
    "kvt_num_unauthenticated": (c_uint64, (c_void_p,)),
    "kvt_num_ungranted": (c_uint64, (c_void_p,)),
    "kvt_destroy": (None, (c_void_p,)),
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
    return build_library(
        SOURCE,
        parts=sorted(SOURCE.parent.glob("*/*.[ch]")),
        header_dirs=[INCLUDE_FOLDER],
        include_dirs=lambda: [loader.include_folder(loader.load())],
        flags=_FLAGS,
    )
