"""Reads a GGUF file with numpy: metadata, and tensors one by one out of a memory map.

Tensors come out quantised as they are stored, or as float32, float16, or uint16 that holds bfloat16 bits.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np

from diptych.checkpoints.gguf_header import read_header, size_of
from diptych.checkpoints.quantization.gguf_blocks import TYPES
from diptych.checkpoints.quantization.weight import Stored
from diptych.common.errors import ConfigError


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
