"""Metadata survives its journey, and anything else is refused with a reason."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Any

import pytest

from diptych.kvtransfer import metadata as codec
from diptych.kvtransfer.errors import LayoutMismatch, MalformedMetadata
from diptych.kvtransfer.layout import HeadShare, PoolLayout, Region
from diptych.kvtransfer.process import ProcessIdentity
from diptych.v1 import bootstrap_pb2, transfer_pb2

SIZES: dict[str, Any] = {
    "num_pages": 64,
    "num_layers": 30,
    "page_size": 16,
    "num_kv_heads": 3,
    "head_dim": 64,
    "dtype": "bfloat16",
}
LAYOUT = PoolLayout.kv(**SIZES)
METADATA = codec.EngineMetadata(
    process=ProcessIdentity("0b0e4b1c-boot", "pid:[4026531836]", 1234, 567890),
    layout=LAYOUT,
    pool_base=0x7F00_0000_0000,
    pool_key=b"\x00key\xff",
    worker_address=b"\x00address\xff",
    library="UCX 1.22.0",
    link_key=b"sixteen bytes ok",
    addresses=(ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("fd00::1")),
)


def with_changes(**changes: Any) -> PoolLayout:
    return PoolLayout.kv(**{**SIZES, **changes})


@pytest.mark.parametrize("share", [None, HeadShare(rank=0, num_ranks=2, total_kv_heads=6)])
def test_metadata_is_the_same_after_its_journey(share: HeadShare | None) -> None:
    layout = with_changes(share=share)
    metadata = dataclasses.replace(METADATA, layout=layout)
    assert codec.decode(codec.encode(metadata), like=layout) == metadata


def test_a_pool_with_more_pages_is_no_other_pool() -> None:
    mine = dataclasses.replace(LAYOUT, num_pages=1)
    assert codec.decode(codec.encode(METADATA), like=mine).layout == LAYOUT


@pytest.mark.parametrize(
    "other",
    [
        with_changes(num_layers=15, page_size=32),  # as many bytes
        with_changes(num_kv_heads=6),
        with_changes(head_dim=128, page_size=8),
    ],
)
def test_pages_of_another_model_are_refused(other: PoolLayout) -> None:
    with pytest.raises(LayoutMismatch, match="KV of another model"):
        codec.decode(codec.encode(METADATA), like=other)


@pytest.mark.parametrize(
    "other",
    [
        with_changes(page_size=32),
        with_changes(dtype="fp8_e4m3"),
        with_changes(num_kv_heads=1, share=HeadShare(2, 3, 3)),
    ],
)
def test_pages_that_can_be_converted_are_welcome(other: PoolLayout) -> None:
    assert codec.decode(codec.encode(METADATA), like=other) == METADATA


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(version=2), "version 2, ours is 3"),
        (dict(link_key=b""), "a link key of 0 bytes, not 16"),
        (dict(worker_address=b""), "without an address"),
        (dict(pool_key=b""), "without an address"),
        (dict(pool_base=0), "without an address"),
        (dict(process_scope=""), "without a process"),
        (dict(pid=0), "without a process"),
    ],
)
def test_metadata_that_lacks_something_is_refused(change: dict[str, int | bytes], reason: str) -> None:
    wire = transfer_pb2.EngineMetadata.FromString(codec.encode(METADATA))
    for name, value in change.items():
        setattr(wire, name, value)
    with pytest.raises(MalformedMetadata, match=reason):
        codec.decode(wire.SerializeToString(), like=LAYOUT)


def test_metadata_of_another_backend_is_refused_with_what_to_change() -> None:
    data = codec.encode(dataclasses.replace(METADATA, backend="nixl"))
    assert codec.decode(data, like=LAYOUT, backend="nixl").backend == "nixl"
    with pytest.raises(MalformedMetadata, match="metadata of nixl, but we use ucx"):
        codec.decode(data, like=LAYOUT)


@pytest.mark.parametrize("change", [dict(num_pages=0), dict(num_ranks=0), dict(regions=[])])
def test_an_impossible_pool_is_refused(change: dict[str, Any]) -> None:
    wire = transfer_pb2.EngineMetadata.FromString(codec.encode(METADATA))
    for name in change:
        wire.layout.ClearField(name)
    with pytest.raises(MalformedMetadata, match="impossible pool"):
        codec.decode(wire.SerializeToString(), like=LAYOUT)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="int3"), "KV dtype must be one of"),
        (dict(layers=[1, 0]), "must ascend"),
        (dict(layers=[]), "at least 1"),
        (dict(num_planes=0), "at least 1"),
        (dict(reach="slot"), "'slot' is not held by pages yet"),
        (dict(reach="never"), "'never' is unknown"),
    ],
)
def test_an_impossible_region_is_refused(change: dict[str, Any], reason: str) -> None:
    region = {**dataclasses.asdict(LAYOUT.sole_region), **change}
    wire = transfer_pb2.EngineMetadata.FromString(codec.encode(METADATA))
    wire.layout.regions[0].CopyFrom(bootstrap_pb2.KvRegion(**region))
    with pytest.raises(MalformedMetadata, match=f"impossible pool: .*{reason}"):
        codec.decode(wire.SerializeToString(), like=LAYOUT)


def test_regions_are_the_same_after_their_journey_and_must_be_those_of_the_model() -> None:
    latent = Region((0, 2, 5), 1, 1, 48, "float32", 1)
    layout = dataclasses.replace(LAYOUT, regions=(*LAYOUT.regions, latent))
    metadata = dataclasses.replace(METADATA, layout=layout)
    assert codec.decode(codec.encode(metadata), like=layout) == metadata
    other = dataclasses.replace(latent, layers=(0, 2, 4))
    for regions in (LAYOUT.regions, layout.regions[::-1], (*LAYOUT.regions, other)):
        with pytest.raises(LayoutMismatch, match="KV of another model"):
            codec.decode(codec.encode(metadata), like=dataclasses.replace(layout, regions=regions))
