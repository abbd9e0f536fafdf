"""What an adapter is once it is read: low-rank products to add to some rows of the model's matrices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from diptych.common.arrays import F32
from diptych.common.errors import InvalidRequest

# matrices that see every token and are multiplied as they are: not experts, not embeddings, not "kv_b" of latents
TARGETS: Final = re.compile(r"\d+\.(qkv|q|q_a|q_b|kv_a|o|gate_up|down)")


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
