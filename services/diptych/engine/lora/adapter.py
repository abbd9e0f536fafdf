"""What an adapter is once it is read: low-rank products to add to some rows of the model's matrices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from diptych.common.arrays import F32
from diptych.common.errors import InvalidRequest

TARGETS: Final = re.compile(r"\d+\.(qkv|o|gate_up|down)")  # matrices that see every token: not experts, not embeddings


class InvalidAdapter(InvalidRequest):
    """This model can't run the adapter, or the folder holds none. The message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """To add: `out[:, start : start + num_rows] += (x @ a.T) @ b.T`."""

    target: str  # the matrix, as the model calls it: "0.qkv", ...
    start: int
    a: F32  # [rank, num_columns]
    b: F32  # [num_rows, rank]; the adapter's scale is in it


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter's weights. Equal fingerprints: equal products."""

    fingerprint: str  # 32 hex digits
    products: tuple[Product, ...]
