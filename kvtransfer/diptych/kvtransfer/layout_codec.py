"""`PoolLayout` to and from `diptych.v1.KvLayout`."""

from __future__ import annotations

from typing import cast

from diptych.kvtransfer.layout import PoolLayout, Reach, Region
from diptych.v1 import bootstrap_pb2


def layout_to_wire(layout: PoolLayout) -> bootstrap_pb2.KvLayout:
    return bootstrap_pb2.KvLayout(
        num_pages=layout.num_pages,
        page_size=layout.page_size,
        regions=map(_region_to_wire, layout.regions),
        rank=layout.rank,
        num_ranks=layout.num_ranks,
    )


def layout_from_wire(wire: bootstrap_pb2.KvLayout) -> PoolLayout:
    """Return what it says, for the reader to validate."""
    regions = tuple(map(_region_from_wire, wire.regions))
    return PoolLayout(wire.num_pages, wire.page_size, regions, wire.rank, wire.num_ranks)


def _region_to_wire(region: Region) -> bootstrap_pb2.KvRegion:
    return bootstrap_pb2.KvRegion(
        layers=region.layers,
        num_planes=region.num_planes,
        num_heads=region.num_heads,
        head_dim=region.head_dim,
        dtype=region.dtype,
        total_heads=region.total_heads,
        reach=region.reach,
    )


def _region_from_wire(wire: bootstrap_pb2.KvRegion) -> Region:
    return Region(
        tuple(wire.layers),
        wire.num_planes,
        wire.num_heads,
        wire.head_dim,
        wire.dtype,
        wire.total_heads,
        cast("Reach", wire.reach),
    )
