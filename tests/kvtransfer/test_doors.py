"""The kernel lets in who is admitted: connections over loopback, where each address of 127/8 can be a stranger's."""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator

import pytest

from diptych.kvtransfer.metadata import Address
from diptych.kvtransfer.ucx.doors import Doors, addresses_of, opened_by

ESTABLISHED = 1  # TCP_*
SYN_SENT = 2
FRIEND, STRANGER = "127.0.0.2", "127.0.0.3"
THREE_THOUSAND = frozenset(ipaddress.IPv4Address((10 << 24) + (number << 16) + number) for number in range(3000))


def admitted(*words: str) -> frozenset[Address]:
    return frozenset(map(ipaddress.ip_address, words))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def doors(listener: socket.socket) -> Iterator[Doors]:
    made = Doors([listener.dup()])
    yield made
    made.close()


def knock(listener: socket.socket, source: str) -> socket.socket:
    """Over loopback the answer, if there is one, has come when this returns."""
    caller = socket.socket(listener.family)
    caller.bind((source, 0))
    caller.setblocking(False)
    caller.connect_ex(listener.getsockname()[:2])
    return caller


def state_of(caller: socket.socket) -> int:
    (state,) = struct.unpack_from("B", caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104))
    return int(state)


def state_from(listener: socket.socket, source: str) -> int:
    with knock(listener, source) as caller:
        return state_of(caller)


def test_nobody_gets_a_connection_at_first(listener: socket.socket, doors: Doors) -> None:
    assert {state_from(listener, source) for source in ("127.0.0.1", FRIEND, STRANGER)} == {SYN_SENT}
    assert not doors.are_open


def test_who_is_admitted_gets_one_and_nobody_else(listener: socket.socket, doors: Doors) -> None:
    doors.admit(admitted("10.0.0.1", "fd00::1", FRIEND))
    assert state_from(listener, FRIEND) == ESTABLISHED
    assert state_from(listener, STRANGER) == SYN_SENT
    doors.admit(admitted(STRANGER))
    assert state_from(listener, FRIEND) == SYN_SENT
    assert state_from(listener, STRANGER) == ESTABLISHED


def test_a_connection_outlives_later_lists(listener: socket.socket, doors: Doors) -> None:
    doors.admit(admitted(FRIEND))
    with knock(listener, FRIEND) as caller:
        connection, _ = listener.accept()
        doors.admit(admitted("10.0.0.1"))
        caller.setblocking(True)
        with connection:
            caller.sendall(b"still here")
            assert connection.recv(100) == b"still here"
            connection.sendall(b"so am I")
            assert caller.recv(100) == b"so am I"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
@pytest.mark.parametrize("is_dual", [False, True])
def test_ipv6_is_kept_out_as_well(is_dual: bool) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=is_dual) as server:
        doors = Doors([server.dup()])
        port = server.getsockname()[1]
        with socket.socket(socket.AF_INET6) as caller, socket.socket(socket.AF_INET6) as later:
            for each in (caller, later):
                each.setblocking(False)
            caller.connect_ex(("::1", port))
            assert state_of(caller) == SYN_SENT
            doors.admit(admitted("::1"))
            later.connect_ex(("::1", port))
            assert state_of(later) == ESTABLISHED
        doors.close()


def test_addresses_by_the_thousand_are_a_filter_still(listener: socket.socket, doors: Doors) -> None:
    doors.admit(frozenset(ipaddress.IPv4Address((10 << 24) + number) for number in range(3000)) | admitted(FRIEND))
    assert not doors.are_open
    assert state_from(listener, FRIEND) == ESTABLISHED
    assert state_from(listener, "127.1.0.1") == SYN_SENT


@pytest.mark.parametrize(
    ("asked", "words"), [(None, "does not say where it is"), (THREE_THOUSAND, "no filter of 3000 addresses")]
)
def test_what_can_not_be_kept_out_is_let_in_and_said_once(
    listener: socket.socket,
    doors: Doors,
    caplog: pytest.LogCaptureFixture,
    asked: frozenset[Address] | None,
    words: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        doors.admit(asked)
        doors.admit(asked)
    assert doors.are_open
    assert len(caplog.messages) == 1
    assert words in caplog.text
    assert state_from(listener, STRANGER) == ESTABLISHED
    doors.admit(admitted(FRIEND))
    assert not doors.are_open
    assert state_from(listener, STRANGER) == SYN_SENT


def test_only_new_listeners_of_the_internet_are_taken(listener: socket.socket) -> None:
    def make() -> list[socket.socket]:
        server = socket.create_server(("127.0.0.1", 0))
        local, far = socket.socketpair()
        return [server, local, far, socket.socket()]

    made, doors = opened_by(make)
    assert [door.getsockname() for door in doors] == [made[0].getsockname()]
    for each in (*made, *doors):
        each.close()


def test_addresses_are_read_line_by_line() -> None:
    assert addresses_of("127.0.0.1\n::1\n") == admitted("127.0.0.1", "::1")
