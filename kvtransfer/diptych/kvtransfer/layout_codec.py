"""`PoolLayout` to and from `diptych.v1.KvLayout`."""

from __future__ import annotations

from diptych.kvtransfer.layout import PoolLayout
from diptych.v1 import bootstrap_pb2


def layout_to_wire(layout: PoolLayout) -> bootstrap_pb2.KvLayout:
    return bootstrap_pb2.KvLayout(
        num_pages=layout.num_pages,
        num_layers=layout.num_layers,
        page_size=layout.page_size,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
    )


def layout_from_wire(wire: bootstrap_pb2.KvLayout) -> PoolLayout:
    return PoolLayout(wire.num_pages, wire.num_layers, wire.page_size, wire.num_kv_heads, wire.head_dim, wire.dtype)
