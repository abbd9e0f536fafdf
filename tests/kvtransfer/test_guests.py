"""Whose addresses count."""

from __future__ import annotations

import ipaddress

import pytest

from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.metadata import EngineMetadata
from diptych.kvtransfer.process import ProcessIdentity
from diptych.kvtransfer.ucx.guests import Guests

LAYOUT = PoolLayout.kv(num_pages=64, num_layers=4, page_size=16, num_kv_heads=2, head_dim=64, dtype="float32")
OURS = frozenset(map(ipaddress.ip_address, ("127.0.0.1", "172.17.0.1", "10.0.0.1")))


def peer(host: str, *addresses: str) -> EngineMetadata:
    process = ProcessIdentity(host, "pid:[1]", 1, 1)
    found = tuple(map(ipaddress.ip_address, addresses))
    return EngineMetadata(process, LAYOUT, 1, b"key", b"address", "UCX 1.22.0", bytes(16), addresses=found)


def words(guests: Guests) -> list[str]:
    assert guests.addresses is not None
    return sorted(map(str, guests.addresses))


@pytest.fixture
def guests() -> Guests:
    return Guests("here", OURS)


def test_nobody_is_a_guest_at_first(guests: Guests) -> None:
    assert words(guests) == []


def test_addresses_are_those_of_all_peers_until_they_are_forgotten(guests: Guests) -> None:
    guests.admit(1, peer("there", "10.0.0.2", "fd00::2"))
    guests.admit(2, peer("there", "10.0.0.2"))
    assert words(guests) == ["10.0.0.2", "fd00::2"]
    guests.forget(1)
    assert words(guests) == ["10.0.0.2"]
    guests.forget(2)
    guests.forget(2)
    assert words(guests) == []


def test_addresses_that_every_host_has_admit_peers_of_our_host_only(guests: Guests) -> None:
    guests.admit(1, peer("there", "10.0.0.2", "127.0.0.1", "172.17.0.1"))
    assert words(guests) == ["10.0.0.2"]
    guests.admit(2, peer("here", "10.0.0.1", "127.0.0.1", "172.17.0.1"))
    assert words(guests) == ["10.0.0.1", "10.0.0.2", "127.0.0.1", "172.17.0.1"]


def test_a_peer_that_does_not_say_where_it_is_admits_all_as_long_as_it_is_there(guests: Guests) -> None:
    guests.admit(1, peer("there", "10.0.0.2"))
    guests.admit(2, peer("there"))
    assert guests.addresses is None
    guests.forget(2)
    assert words(guests) == ["10.0.0.2"]
