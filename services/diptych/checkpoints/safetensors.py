"""Reads safetensors files: 8 bytes of header length, a JSON header, the data.

https://github.com/huggingface/safetensors#format

The header says what a file holds and where, and is checked before a byte of the data is looked at. Rule: what is wrong
is an error in words. Memory is taken for the header alone, whatever numbers stand in it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np

from diptych.common.errors import ConfigError

if TYPE_CHECKING:
    from diptych.kernels.quantized import Array

DERIVED: Final = ("rotary_emb.inv_freq",)  # saved by old versions; computed from the configuration instead
FLOATS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy has no bfloat16: its bits
CODES: Final = {  # parts of quantised weights
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
MASKS: Final = {"BOOL": np.bool_}
DTYPES: Final = {**FLOATS, **CODES, **MASKS}
ITEM_BYTES: Final = {name: np.dtype(kind).itemsize for name, kind in DTYPES.items()}
MAX_HEADER_BYTES: Final = 32 << 20  # 90,000 tensors take a third of it
MAX_VALUES: Final = 2_000_000  # of its JSON: a tensor has about ten
MAX_DIMENSIONS: Final = 8


def read_header(path: Path) -> tuple[bytes, int]:
    """Return the JSON header and where the data starts."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= path.stat().st_size - 8:
            raise ConfigError(f"{path} is not a safetensors file, or is cut off")
        if length > MAX_HEADER_BYTES:
            raise ConfigError(f"{path} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        return file.read(length), 8 + length


def tensor_names(path: Path) -> list[str]:
    """Return what a file holds. Raises `ConfigError` for a header that makes no sense."""
    return [entry.name for entry in _entries(path)[0]]


def read_tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield each tensor by name: a view of the file, bfloat16 as the uint16 of its bits."""
    entries, start = _entries(path)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise ConfigError(f"{path}: {entry.name} is {entry.dtype}; readable are {', '.join(DTYPES)}")
        raw = np.frombuffer(data, np.uint8, entry.end - entry.begin, start + entry.begin)
        yield entry.name, raw.view(DTYPES[entry.dtype]).reshape(entry.shape)
        release(data, start + entry.begin, start + entry.end)


def read_blanks(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield zeros for each tensor, in its form, which take no memory. Reads the header alone."""
    for entry in _entries(path)[0]:
        if entry.dtype not in DTYPES:
            raise ConfigError(f"{path}: {entry.name} is {entry.dtype}; readable are {', '.join(DTYPES)}")
        yield entry.name, np.broadcast_to(np.zeros((), DTYPES[entry.dtype]), entry.shape)


def _entries(path: Path) -> tuple[list[Entry], int]:
    """Return what a file holds, and where the data starts."""
    header, start = read_header(path)
    try:
        return read_entries(header, path.stat().st_size - start), start
    except ValueError as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None


def release(data: mmap.mmap, begin: int, end: int) -> None:
    """Give back the memory of a part of a file that was read; a view of it stays valid and reads the file again."""
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        data.madvise(mmap.MADV_DONTNEED, first, end - first)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place: `[begin, end)` from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_entries(header: bytes, data_bytes: int) -> list[Entry]:
    """Return the tensors in the header's order. Raises `ValueError` for what is no header of so many bytes of data."""
    if sum(map(header.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"the header has more than {MAX_VALUES:,} values")
    try:
        values = json.loads(header, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("the header is nested too deep") from None
    if not isinstance(values, dict):
        raise ValueError("the header is no JSON object")
    entries = [_entry(name, value, data_bytes) for name, value in values.items() if name != "__metadata__"]
    _refuse_overlaps(entries)
    if (end := max([entry.end for entry in entries], default=0)) < data_bytes:
        raise ValueError(f"{data_bytes - end} bytes come behind its last tensor: it is damaged")
    return entries


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("the header has a name twice")
    return values


def _entry(name: str, value: object, data_bytes: int) -> Entry:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise ValueError(f"{name} has no dtype")
    dtype, shape, offsets = value["dtype"], value.get("shape"), value.get("data_offsets")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"the shape of {name} is not up to {MAX_DIMENSIONS} whole numbers from 0 on")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"the data_offsets of {name} are not two whole numbers from 0 on, in order")
    begin, end = offsets
    if end > data_bytes:
        raise ValueError(f"it is cut off: {name} ends after the file does")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, which is not what {dtype} of shape {shape} takes")
    return Entry(name, dtype, tuple(shape), begin, end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)


def _refuse_overlaps(entries: Iterable[Entry]) -> None:
    placed = sorted((entry for entry in entries if entry.begin < entry.end), key=lambda entry: entry.begin)
    for before, after in pairwise(placed):
        if after.begin < before.end:
            raise ValueError(f"{before.name} and {after.name} share bytes")
