"""Reads a GGUF file with numpy: metadata, and tensors one by one out of a memory map.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
Tensors come out quantised as they are stored, or as float32, float16, or uint16 that holds bfloat16 bits.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.common.errors import ConfigError
from diptych.engine.quantization.gguf_blocks import TYPES
from diptych.engine.quantization.weight import Stored

SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table."""

    shape: tuple[int, ...]  # numpy order: rows first
    type_id: int
    offset: int  # bytes from the start of the file


class GgufFile:
    """An open GGUF file. `header` is everything before the tensor data."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            reader = _HeaderReader(self._map)
            self.metadata, self.tensors, self.data_offset = reader.read()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ConfigError(f"{path} is not a readable GGUF file: {error!r}") from None
        self.path = path
        self.header = self._map[: self.data_offset]

    def read(self, name: str) -> Stored:
        """Return one tensor. Raises `ConfigError` for a storage type that has no reader."""
        info = self.tensors[name]
        kind = TYPES.get(info.type_id)
        if kind is None:
            known = ", ".join(each.name for each in TYPES.values())
            raise ConfigError(f"{self.path}: {name} has GGML type {info.type_id}; readable are {known}")
        num_blocks = math.prod(info.shape) // kind.block_values
        if info.offset + num_blocks * kind.block_bytes > len(self._map):
            raise ConfigError(f"{self.path} is cut off: {name} ends after the file does")
        raw = np.frombuffer(self._map, np.uint8, num_blocks * kind.block_bytes, info.offset)
        num_rows = math.prod(info.shape[:-1])
        tensor = kind.unpack(raw.reshape(num_rows, -1, kind.block_bytes))
        return tensor.reshape(info.shape) if isinstance(tensor, np.ndarray) else tensor


class _HeaderReader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo], int]:
        magic, version = self._take("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise struct.error(f"magic {magic!r}, version {version}")
        num_tensors, num_keys = self._take("QQ")
        metadata = {self._string(): self._value(self._take("I")[0]) for _ in range(num_keys)}
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        return metadata, {name: TensorInfo(shape, kind, start + at) for name, shape, kind, at in entries}, start

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take(SCALARS[kind])[0]
        item_kind, count = self._take("IQ")
        if item_kind in SCALARS:
            return list(self._take(f"{count}{SCALARS[item_kind]}"))
        return [self._value(item_kind) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._take("I")
        shape = self._take(f"{num_dims}Q")
        kind, offset = self._take("IQ")
        return name, shape[::-1], kind, offset
