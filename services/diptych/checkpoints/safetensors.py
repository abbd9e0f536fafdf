"""Reads safetensors files: 8 bytes of header length, a JSON header, the data.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from diptych.checkpoints.safetensors_header import MAX_HEADER_BYTES, Entry, read_entries
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array

FLOATS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy has no bfloat16: its bits
CODES: Final = {"F8_E4M3": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64}  # parts of quantised weights
DTYPES: Final = {**FLOATS, **CODES}


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
