"""Whom a transport listens to, and where it lets them write: whatever sort it is, where it has a say."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.kvtransfer.transport import ANY_PEER, LinkDown, LinkUp, NoteReceived, OpDone, Refusals
from diptych.v1 import transfer_pb2

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]

VICTIM, FRIEND, STRANGER = 0xFFFF_0000_0000_0001, 2, 3
ALL = list(range(64))
ESTABLISHED, SYN_SENT = 1, 2  # TCP_*


def guessed(metadata: bytes) -> bytes:
    """What somebody knows of an instance who knows all but its key."""
    wire = transfer_pb2.EngineMetadata.FromString(metadata)
    wire.link_key = bytes(16)
    return wire.SerializeToString()


def down(peer: int) -> Callable[[Any], bool]:
    return lambda event: isinstance(event, LinkDown) and event.peer == peer


def still_talk(left: Any, right: Any) -> bool:
    right.events.clear()
    left.note(right.instance_id, b"still here")
    return bool(right.wait_note() == NoteReceived(left.instance_id, b"still here"))


@pytest.mark.parametrize("make_end", ["inproc", "shm", "tcp"], indirect=True)
def test_who_lacks_the_key_never_gets_a_link_and_disturbs_no_other(make_end: Make, link: Link) -> None:
    victim, friend = make_end(VICTIM), make_end(FRIEND)
    stranger = make_end(STRANGER, connect_s=1.0)
    link(victim, friend)
    stranger.connect(VICTIM, guessed(victim.metadata()))
    victim.connect(STRANGER, stranger.metadata())  # even if it is expected
    stranger.wait(down(VICTIM))
    assert LinkUp(VICTIM) not in stranger.events
    assert LinkUp(STRANGER) not in victim.events
    assert victim.refusals().num_unauthenticated > 0
    assert friend.refusals() == Refusals()
    assert still_talk(friend, victim)
    assert still_talk(victim, friend)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_friends_name_is_not_enough(kind: str, make_child_end: Make, link: Link) -> None:
    """A process of its own that claims to be the friend: the words that would end or restart the link are not heard."""
    victim, friend = make_child_end(kind, VICTIM), make_child_end(kind, FRIEND)
    link(victim, friend)
    liar = make_child_end(kind, FRIEND, connect_s=0.5)
    liar.connect(VICTIM, guessed(victim.metadata()))
    liar.wait(down(VICTIM))
    assert victim.refusals().num_unauthenticated > 0
    assert still_talk(friend, victim)
    assert victim.events == [NoteReceived(FRIEND, b"still here")]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_who_has_the_key_but_is_no_peer_gets_no_link(kind: str, make_child_end: Make, link: Link) -> None:
    victim, friend = make_child_end(kind, VICTIM), make_child_end(kind, FRIEND)
    link(victim, friend)  # it admits the address of both
    stranger = make_child_end(kind, STRANGER, connect_s=0.5)
    stranger.connect(VICTIM, victim.metadata())
    stranger.wait(down(VICTIM))
    assert victim.refusals() == Refusals()
    assert victim.ask("dropped") > 0
    victim.events.clear()
    assert still_talk(friend, victim)
    assert victim.events == [NoteReceived(FRIEND, b"still here")]


def ports_of(end: Any) -> list[tuple[str, int]]:
    """Where the UCX of an end in a process listens."""
    found = psutil.Process(end.child.process.pid).net_connections("tcp")
    return [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]


def strike(host: str, port: int, source: str) -> int:
    """Open a connection as UCX does, and send what none of its ends sends. Return the state of the connection."""
    with socket.socket() as stranger:
        stranger.bind((source, 0))
        stranger.setblocking(False)  # over loopback, an answer comes at once
        stranger.connect_ex((host, port))
        state = stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[0]
        if state == ESTABLISHED:
            stranger.sendall(struct.pack("<QBI", 0xCAFEBABE12345678, 10, 1000) + bytes(1000))
    return state


def test_strangers_get_no_connection_of_ucx_however_well_they_know_it(make_child_end: Make, link: Link) -> None:
    """A connection and a dozen bytes end a process that listens by UCX, before it sees a message."""
    victim, friend = make_child_end("tcp", VICTIM), make_child_end("tcp", FRIEND)
    (port,) = [port for host, port in ports_of(victim) if host == "127.0.0.1"]
    assert [strike("127.0.0.1", port, source) for source in ("127.0.0.1", "127.0.0.9")] == [SYN_SENT] * 2
    link(victim, friend)
    assert strike("127.0.0.1", port, "127.0.0.9") == SYN_SENT
    friend.fill(1)
    friend.write(VICTIM, [1, 2], [7, 8], b"done")
    assert victim.wait_note() == NoteReceived(FRIEND, b"done")
    assert victim.digest([7, 8]) == friend.digest([1, 2])
    assert not victim.refusals().is_open


def test_nobody_writes_into_our_memory_by_ucxs_own_means(make_child_end: Make, link: Link) -> None:
    """UCX emulates remote memory access over TCP without asking who it is: a process that has our address tries it."""
    victim, friend = make_child_end("tcp", VICTIM), make_child_end("tcp", FRIEND)
    link(victim, friend)  # it admits the address of both
    victim.fill(1)
    before = victim.digest(ALL)
    wire = transfer_pb2.EngineMetadata.FromString(victim.metadata())
    intruder = [sys.executable, str(Path(__file__).with_name("intruder.py"))]
    words = [*intruder, wire.worker_address.hex(), str(wire.pool_base)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert victim.digest(ALL) == before


KINDS = pytest.mark.parametrize("make_end", ["inproc", "tcp", "emulated-staged"], indirect=True)


@KINDS
@pytest.mark.parametrize("grantee", [FRIEND, ANY_PEER])
def test_granted_pages_are_written(make_end: Make, link: Link, grantee: int) -> None:
    writer, target = make_end(FRIEND), make_end(VICTIM, only_granted=True)
    link(writer, target)
    writer.fill(1)
    target.grant(grantee, [7, 8, 30])
    op = writer.write(VICTIM, [1, 2, 3], [7, 8, 30], b"done")
    assert target.wait_note() == NoteReceived(FRIEND, b"done")
    assert writer.wait_done(op) == OpDone(op, None)
    assert target.digest([7, 8, 30]) == writer.digest([1, 2, 3])
    assert target.refusals() == Refusals()


@KINDS
@pytest.mark.parametrize(
    "dst", [[9], [6, 7], [8, 9], [40, 41, 42]], ids=["beside", "one before", "one behind", "another peer's"]
)
def test_pages_that_were_not_granted_stay_as_they_are_and_the_link_ends(
    make_end: Make, link: Link, dst: list[int]
) -> None:
    writer, target = make_end(FRIEND), make_end(VICTIM, only_granted=True)
    link(writer, target)
    writer.fill(1)
    target.fill(2)
    target.grant(FRIEND, [7, 8])
    target.grant(STRANGER, [40, 41, 42])
    foreign = [page for page in ALL if page not in (7, 8)]
    before = target.digest(foreign)
    writer.write(VICTIM, list(range(len(dst))), dst, b"done")
    target.wait(down(FRIEND))
    writer.wait(down(VICTIM))
    assert target.digest(foreign) == before
    assert target.refusals() == Refusals(num_ungranted=1)
    assert NoteReceived(FRIEND, b"done") not in target.events


@KINDS
def test_a_page_that_was_revoked_is_not_written(make_end: Make, link: Link) -> None:
    writer, target = make_end(FRIEND), make_end(VICTIM, only_granted=True)
    link(writer, target)
    writer.fill(1)
    target.grant(FRIEND, [7])
    writer.write(VICTIM, [1], [7], b"in time")
    target.wait_note()
    target.revoke([7])
    before = target.digest(ALL)
    writer.write(VICTIM, [2], [7], b"late")
    target.wait(down(FRIEND))
    assert target.digest(ALL) == before
