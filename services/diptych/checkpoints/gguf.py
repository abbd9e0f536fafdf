"""Reads a GGUF file with numpy: metadata, and tensors one by one out of a memory map.

Tensors come out quantised as they are stored, or as float32, float16, or uint16 that holds bfloat16 bits.

The header says where each tensor is, and is checked before a byte of the data is looked at.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
Rule: a number in the header is believed only as far as the bytes behind it go; what is wrong is a `ValueError`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.checkpoints.quantization.gguf_blocks import TYPES
from diptych.checkpoints.quantization.weight import Stored
from diptych.common.errors import ConfigError

SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_HEADER_BYTES: Final = 64 << 20  # a vocabulary of 262,144 tokens and its merges take a quarter of it
MAX_ENTRIES: Final = 200_000  # keys and tensors
MAX_ITEMS: Final = 8_000_000  # of all arrays together; such a vocabulary takes 1.3 million
MAX_DEPTH: Final = 4  # of arrays in arrays
MAX_DIMENSIONS: Final = 4  # as ggml has it
MAX_ALIGNMENT: Final = 1 << 20
Readable = bytes | mmap.mmap  # of a file


class GgufFile:
    """An open GGUF file. `header` is everything before the tensor data."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            header = read_header(self._map)
        except ValueError as error:  # an empty file can't be mapped
            raise ConfigError(f"{path} is not a readable GGUF file: {error}") from None
        self.metadata, self.tensors, self.data_offset = header.metadata, header.tensors, header.num_bytes
        self.path = path
        self.header = self._map[: self.data_offset]

    def read(self, name: str) -> Stored:
        """Return one tensor. Raises `ConfigError` for a storage type that has no reader."""
        info = self.tensors[name]
        kind = TYPES.get(info.type_id)
        if kind is None:
            known = ", ".join(each.name for each in TYPES.values())
            raise ConfigError(f"{self.path}: {name} has GGML type {info.type_id}; readable are {known}")
        raw = np.frombuffer(self._map, np.uint8, size_of(name, info), info.offset)
        num_rows = math.prod(info.shape[:-1])
        tensor = kind.unpack(raw.reshape(num_rows, -1, kind.block_bytes))
        return tensor.reshape(info.shape) if isinstance(tensor, np.ndarray) else tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table."""

    shape: tuple[int, ...]  # numpy order: rows first
    type_id: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the tensor data."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    num_bytes: int


def read_header(data: Readable) -> Header:
    """Raises `ValueError` for what is no header of these bytes."""
    reader = _Reader(data)
    magic, version = reader.unpack("4sI")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"magic {magic!r}, version {version}")
    num_tensors, num_keys = reader.unpack("QQ")
    if num_tensors + num_keys > MAX_ENTRIES:
        raise ValueError(f"{num_tensors} tensors and {num_keys} keys are more than {MAX_ENTRIES}")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        _set_once(metadata, reader.string(), reader.value(reader.unpack("I")[0]))
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        _set_once(found, reader.string(), reader.tensor())
    start = _aligned(reader.at, metadata.get("general.alignment", 32))
    tensors = {name: TensorInfo(shape, kind, start + offset) for name, (shape, kind, offset) in found.items()}
    _refuse_misplaced(tensors, len(data))
    return Header(metadata, tensors, start)


def _set_once(values: dict[str, Any], name: str, value: Any) -> None:
    if name in values:
        raise ValueError(f"{name} comes twice")
    values[name] = value


def _aligned(at: int, alignment: object) -> int:
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, but must be a power of 2 up to {MAX_ALIGNMENT}")
    return -(-at // alignment) * alignment


def _refuse_misplaced(tensors: Mapping[str, TensorInfo], num_bytes: int) -> None:
    """Raise for tensors that end after the file does, or share bytes; of types that are not known nothing is known."""
    places = sorted((info.offset, info.offset + size_of(name, info), name) for name, info in tensors.items())
    for _, end, name in places:
        if end > num_bytes:
            raise ValueError(f"it is cut off: {name} ends after the file does")
    for (_, end, name), (begin, _, after) in pairwise(places):
        if begin < end:
            raise ValueError(f"{name} and {after} share bytes")


def size_of(name: str, info: TensorInfo) -> int:
    """Return how many bytes a tensor takes; 0: its type is not known."""
    kind = TYPES.get(info.type_id)
    if kind is None:
        return 0
    if info.shape[-1] % kind.block_values:
        raise ValueError(f"rows of {info.shape[-1]} values in {name} are no blocks of {kind.name}")
    return math.prod(info.shape) // kind.block_values * kind.block_bytes


class _Reader:
    def __init__(self, data: Readable) -> None:
        self._data = data
        self._num_items = 0  # that arrays promised up to here
        self.at = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self._bytes(struct.calcsize("<" + layout)))

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError(f"the header ends after the file does: {count} bytes are missing at byte {self.at}")
        self.at += count
        if self.at > MAX_HEADER_BYTES:
            raise ValueError(f"the header has more than {MAX_HEADER_BYTES} bytes")
        return self._data[self.at - count : self.at]

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return self._bytes(length).decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(depth + 1)
        if kind not in SCALARS:
            raise ValueError(f"there is no type {kind} of metadata")
        return self.unpack(SCALARS[kind])[0]

    def _array(self, depth: int) -> list[Any]:
        item_kind, count = self.unpack("IQ")
        self._num_items += count
        if depth > MAX_DEPTH or self._num_items > MAX_ITEMS:
            raise ValueError(f"arrays have more than {MAX_ITEMS:,} items, or are nested deeper than {MAX_DEPTH}")
        if item_kind in SCALARS:
            return list(self.unpack(f"{count}{SCALARS[item_kind]}"))
        return [self.value(item_kind, depth) for _ in range(count)]

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Return shape, type and offset in the data."""
        (num_dims,) = self.unpack("I")
        if not 0 < num_dims <= MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dims} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = self.unpack(f"{num_dims}Q")
        if 0 in shape:
            raise ValueError(f"a tensor has the shape {shape}: no values")
        kind, offset = self.unpack("IQ")
        return shape[::-1], kind, offset
