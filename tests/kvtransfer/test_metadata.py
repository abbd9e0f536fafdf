"""Metadata survives its journey, and anything else is refused with a reason."""

from __future__ import annotations

import dataclasses
import ipaddress

import pytest

from diptych.kvtransfer import metadata as codec
from diptych.kvtransfer.errors import LayoutMismatch, MalformedMetadata
from diptych.kvtransfer.layout import HeadShare, PoolLayout
from diptych.kvtransfer.process import ProcessIdentity
from diptych.v1 import transfer_pb2

LAYOUT = PoolLayout.kv(num_pages=64, num_layers=30, page_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")
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


@pytest.mark.parametrize("share", [None, HeadShare(rank=0, num_ranks=2, total_kv_heads=6)])
def test_metadata_is_the_same_after_its_journey(share: HeadShare | None) -> None:
    layout = dataclasses.replace(LAYOUT, share=share)
    metadata = dataclasses.replace(METADATA, layout=layout)
    assert codec.decode(codec.encode(metadata), like=layout) == metadata


def test_a_pool_with_more_pages_is_no_other_pool() -> None:
    mine = dataclasses.replace(LAYOUT, num_pages=1)
    assert codec.decode(codec.encode(METADATA), like=mine).layout == LAYOUT


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(LAYOUT, num_layers=15, page_size=32),  # as many bytes
        dataclasses.replace(LAYOUT, num_kv_heads=6),
        dataclasses.replace(LAYOUT, head_dim=128, page_size=8),
    ],
)
def test_pages_of_another_model_are_refused(other: PoolLayout) -> None:
    with pytest.raises(LayoutMismatch, match="KV of another model"):
        codec.decode(codec.encode(METADATA), like=other)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(LAYOUT, page_size=32),
        dataclasses.replace(LAYOUT, dtype="fp8_e4m3"),
        dataclasses.replace(LAYOUT, num_kv_heads=1, share=HeadShare(2, 3, 3)),
    ],
)
def test_pages_that_can_be_converted_are_welcome(other: PoolLayout) -> None:
    assert codec.decode(codec.encode(METADATA), like=other) == METADATA


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(version=1), "version 1, ours is 2"),
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


@pytest.mark.parametrize("change", [dict(num_pages=0), dict(dtype="int3")])
def test_an_impossible_pool_is_refused(change: dict[str, int | str]) -> None:
    wire = transfer_pb2.EngineMetadata.FromString(codec.encode(METADATA))
    for name, value in change.items():
        setattr(wire.layout, name, value)
    with pytest.raises(MalformedMetadata, match="impossible pool"):
        codec.decode(wire.SerializeToString(), like=LAYOUT)


def test_metadata_that_was_cut_off_is_refused_unless_all_that_must_be_there_is_there() -> None:
    data = codec.encode(METADATA)
    for length in range(len(data)):
        try:
            decoded = codec.decode(data[:length], like=LAYOUT)
        except MalformedMetadata:
            continue
        assert set(decoded.addresses) <= set(METADATA.addresses)
        assert dataclasses.replace(METADATA, library="", addresses=()) == dataclasses.replace(
            decoded, library="", addresses=()
        )


@pytest.mark.parametrize(
    ("addresses", "words"),
    [([b"10.0.0.1"], "impossible address"), ([b""], "impossible address"), ([bytes(4)] * 65, "65 addresses")],
)
def test_addresses_that_are_none_or_too_many_are_refused(addresses: list[bytes], words: str) -> None:
    wire = transfer_pb2.EngineMetadata.FromString(codec.encode(METADATA))
    wire.addresses[:] = addresses
    with pytest.raises(MalformedMetadata, match=words):
        codec.decode(wire.SerializeToString(), like=LAYOUT)


def test_metadata_of_an_older_version_names_no_addresses() -> None:
    wire = transfer_pb2.EngineMetadata.FromString(codec.encode(METADATA))
    del wire.addresses[:]
    assert codec.decode(wire.SerializeToString(), like=LAYOUT) == dataclasses.replace(METADATA, addresses=())
