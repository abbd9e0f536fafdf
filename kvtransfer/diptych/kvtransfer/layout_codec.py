"""`PoolLayout` to and from `diptych.v1.KvLayout`."""

from __future__ import annotations

from diptych.kvtransfer.layout import HeadShare, PoolLayout
from diptych.v1 import bootstrap_pb2


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
