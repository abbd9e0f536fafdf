"""Reads safetensors files: 8 bytes of header length, a JSON header, the data.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array

FLOATS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy has no bfloat16: its bits
CODES: Final = {"F8_E4M3": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64}  # parts of quantised weights
DTYPES: Final = {**FLOATS, **CODES}


def read_header(path: Path) -> tuple[bytes, int]:
    """Return the JSON header and where the data starts."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ConfigError(f"{path} is not a safetensors file, or is cut off")
        return file.read(length), 8 + length


def tensor_names(path: Path) -> list[str]:
    """Return what a file holds."""
    return [name for name in json.loads(read_header(path)[0]) if name != "__metadata__"]


def read_tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield each tensor by name: a view of the file, bfloat16 as the uint16 of its bits."""
    header, start = read_header(path)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, entry in json.loads(header).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ConfigError(f"{path}: {name} is {entry['dtype']}; readable are {', '.join(DTYPES)}")
        begin, end = (start + offset for offset in entry["data_offsets"])
        if end > len(data):
            raise ConfigError(f"{path} is cut off: {name} ends after the file does")
        raw = np.frombuffer(data, np.uint8, end - begin, begin)
        yield name, raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        release(data, begin, end)


def release(data: mmap.mmap, begin: int, end: int) -> None:
    """Give back the memory of a part of a file that was read; a view of it stays valid and reads the file again."""
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    data.madvise(mmap.MADV_DONTNEED, first, end - first)
