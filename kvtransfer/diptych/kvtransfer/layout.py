"""How the KV pool of a worker is laid out: page-major, so that a page is one contiguous piece for all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import ConfigError
from diptych.v1 import bootstrap_pb2

DTYPE_NBYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Which KV heads of a model a pool holds: those of one of several ranks."""

    rank: int
    num_ranks: int
    total_kv_heads: int  # of the model


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """`kv[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`, contiguous; index 2 is K, then V."""

    num_pages: int
    num_layers: int
    page_size: int  # tokens a page
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_NBYTES
    share: HeadShare | None = None  # of the model's heads; None: the pool has all

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_pages, self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def page_nbytes(self) -> int:
        return self.num_layers * self.layer_nbytes

    @property
    def layer_nbytes(self) -> int:
        """Of each page."""
        return math.prod(self.shape[2:]) * DTYPE_NBYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_nbytes

    def validate(self) -> None:
        """Raise `ConfigError` for a layout that can't hold anything."""
        if self.dtype not in DTYPE_NBYTES:
            raise ConfigError(f"KV dtype must be one of {', '.join(DTYPE_NBYTES)}, not {self.dtype!r}")
        if min(self.shape) < 1:
            raise ConfigError(f"every dimension of a KV pool must be at least 1: {self.shape}")
        if self.layer_nbytes % 8:
            raise ConfigError(f"a layer of a KV page must be a multiple of 8 bytes, not {self.layer_nbytes}")


def layout_to_wire(layout: PoolLayout) -> bootstrap_pb2.KvLayout:
    wire = bootstrap_pb2.KvLayout(
        num_pages=layout.num_pages,
        num_layers=layout.num_layers,
        page_size=layout.page_size,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
    )
    if layout.share is not None:
        share = layout.share
        wire.share.CopyFrom(
            bootstrap_pb2.HeadShare(rank=share.rank, num_ranks=share.num_ranks, total_kv_heads=share.total_kv_heads)
        )
    return wire


def layout_from_wire(wire: bootstrap_pb2.KvLayout) -> PoolLayout:
    share = None
    if wire.HasField("share"):
        share = HeadShare(wire.share.rank, wire.share.num_ranks, wire.share.total_kv_heads)
    return PoolLayout(
        wire.num_pages, wire.num_layers, wire.page_size, wire.num_kv_heads, wire.head_dim, wire.dtype, share
    )
