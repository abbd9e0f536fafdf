"""What becomes of a link whose peer dies, freezes or is cut off: real processes, the options that users get.

Every fault is noticed, everything in flight to that peer ends, and nobody else feels it. How soon follows from the
options (`test_a_lost_peer_is_given_up_within_two_seconds`). Here seconds are told, and gate nothing: a busy machine is
slower.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone
from diptych.kvtransfer.ucx import UcxOptions
from diptych.v1.transfer_pb2 import EngineMetadata

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]
Record = Callable[[str, float], None]

LEFT, RIGHT, OTHER, SUCCESSOR = 1, 2, 3, 4
EVERYTHING = list(range(64))
HUNG_S = 60.0
DEFAULTS = {name: getattr(UcxOptions(), name) for name in ("heartbeat_s", "heartbeat_misses", "connect_s")}


def kill(end: Any) -> None:
    end.kill()


def kill_and_leave_a_zombie(end: Any) -> None:
    """Its parent, this process, does not reap it."""
    end.process.send_signal(signal.SIGKILL)


def stop(end: Any) -> None:
    end.process.send_signal(signal.SIGSTOP)


@contextlib.contextmanager
def woken(*ends: Any) -> Iterator[None]:
    """Wake processes at the end, so that they can be used again."""
    try:
        yield
    finally:
        for end in ends:
            if end.process.returncode is None:
                end.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def ended(end: Any) -> Iterator[None]:
    """Kill a process at the end. One that wakes may crash who wrote to it over TCP: docs/operations/kv-links.md."""
    try:
        yield
    finally:
        end.kill()


def submit(end: Any, peer: int, count: int) -> list[int]:
    """Write all pages again and again, as long as there is a link; return the operations."""
    ops: list[int] = []
    with contextlib.suppress(Exception):  # PeerUnreachable: the fault has been noticed already
        for _ in range(count):
            ops.append(end.write(peer, EVERYTHING, EVERYTHING, b"written"))
    return ops


def notice(left: Any, right: Any, other: Any, strike: Callable[[Any], None], record: Record) -> None:
    """Have `right` struck while pages are on their way to it; record after how many seconds its link is down."""
    is_acknowledged = "tcp" in left.lanes(RIGHT)  # by the peer; a write into shared memory needs nobody's help
    ops = submit(left, RIGHT, 20)
    strike(right)
    began_s = time.monotonic()
    ops += submit(left, RIGHT, 20)
    left.write(OTHER, EVERYTHING, EVERYTHING, b"for the other")
    assert other.wait_note() == NoteReceived(LEFT, b"for the other")
    assert other.digest(EVERYTHING) == left.digest(EVERYTHING)
    left.wait(lambda event: isinstance(event, LinkDown), HUNG_S)
    elapsed_s = time.monotonic() - began_s
    record("noticed_s", round(elapsed_s, 3))
    print(f"noticed after {elapsed_s:.2f} s")
    story = [event for event in left.events if isinstance(event, LinkDown) or getattr(event, "op", 0) in ops]
    assert [event.op for event in story[:-1]] == ops
    assert isinstance(story[-1], LinkDown)
    assert story[-1].peer == RIGHT
    assert not is_acknowledged or story[-2].error is not None
    with pytest.raises(Exception, match="no link"):
        left.note(RIGHT, b"hello")
    left.note(OTHER, b"still here")
    other.wait(lambda event: event == NoteReceived(LEFT, b"still here"))


@pytest.fixture
def three(make_process_end: Make, link: Link) -> tuple[Any, Any, Any]:
    return linked(make_process_end, link)


def linked(make: Make, link: Link) -> tuple[Any, Any, Any]:
    left, right, other = (make(instance, **DEFAULTS) for instance in (LEFT, RIGHT, OTHER))
    link(left, right)
    link(left, other)
    left.fill(1)
    return left, right, other


@pytest.mark.parametrize("strike", [kill, kill_and_leave_a_zombie, stop])
def test_a_dead_or_frozen_process_is_noticed(
    three: tuple[Any, Any, Any], strike: Callable[[Any], None], record_property: Record
) -> None:
    with ended(three[1]):
        notice(*three, strike, record_property)


@pytest.mark.parametrize(
    "strike",
    [
        lambda right: right.pull_cable(),
        lambda right: right.lose_words_to(right.centre),
        lambda right: right.centre.lose_words_to(right),
        lambda right: right.vanish(),
    ],
    ids=["cable", "its words are lost", "our words are lost", "the host vanishes"],
)
def test_a_cut_network_is_noticed(
    make_host_end: Make, link: Link, strike: Callable[[Any], None], record_property: Record
) -> None:
    notice(*linked(make_host_end, link), strike, record_property)


def test_a_successor_is_not_taken_for_the_one_it_replaced(make_process_end: Make, link: Link) -> None:
    left, right = make_process_end(LEFT), make_process_end(RIGHT)
    link(left, right)
    left.fill(1)
    ops = start_long_writes(left, RIGHT)
    with woken(left):
        stop(left)  # in the middle of writing: it does not see what happens now
        kill(right)
        successor = make_process_end(SUCCESSOR)
        successor.fill(2)
        before = successor.digest(EVERYTHING)
    left.wait_link(up=False)
    assert [event.op for event in left.events if isinstance(event, OpDone)] == ops
    left.events.clear()
    successor.connect(LEFT, left.metadata())
    left.connect(RIGHT, successor.metadata())  # as stale membership says: the former name at this address
    assert [type(end.wait_link(up=False)) for end in (left, successor)] == [LinkDown, LinkDown]
    assert successor.ask("dropped") > 0
    with pytest.raises(Exception, match="no link"):
        left.write(RIGHT, EVERYTHING, EVERYTHING)
    assert successor.digest(EVERYTHING) == before
    assert not any(isinstance(event, LinkUp) for event in left.events + successor.events)
    link(left, successor)
    left.write(SUCCESSOR, EVERYTHING, EVERYTHING, b"for you")
    assert successor.wait_note() == NoteReceived(LEFT, b"for you")
    assert successor.digest(EVERYTHING) == left.digest(EVERYTHING)


def start_long_writes(end: Any, peer: int) -> list[int]:
    """Begin to write for a good while; return the operations."""
    return [end.write(peer, EVERYTHING * 50, EVERYTHING * 50) for _ in range(20)]


def test_pages_that_were_reused_are_safe_from_a_frozen_writer_that_wakes(make_process_end: Make, link: Link) -> None:
    left = make_process_end(LEFT)
    right = make_process_end(RIGHT, heartbeat_misses=1000)  # it finds nothing wrong by itself
    link(left, right)
    right.fill(7)
    ops = start_long_writes(right, LEFT)
    with woken(right):
        stop(right)
        left.wait_link(up=False)
        assert not left.writer_gone(RIGHT)  # so the pages stay in quarantine
    right.wait_link(up=False)
    assert [event.op for event in right.events if isinstance(event, OpDone)] == ops
    assert right.wait_done(ops[-1]).error is not None  # it was in the middle of writing
    for end in (left, right):
        end.events.clear()
    link(left, right)
    assert left.writer_gone(RIGHT)
    left.fill(9)
    reused = left.digest(EVERYTHING)
    right.note(LEFT, b"all that was under way has arrived")
    left.wait_note()
    assert left.digest(EVERYTHING) == reused


@pytest.mark.parametrize("strike", [kill, kill_and_leave_a_zombie])
def test_a_dead_writer_is_provably_gone(three: tuple[Any, Any, Any], strike: Callable[[Any], None]) -> None:
    left, right, _ = three
    start_long_writes(right, LEFT)
    strike(right)
    left.wait_link(up=False)
    deadline_s = time.monotonic() + HUNG_S
    while not left.writer_gone(RIGHT):  # its sockets may be closed before its last thread is dead
        assert time.monotonic() < deadline_s
        left.pump(0.05)


def test_a_writer_in_another_container_is_not_gone_because_it_cannot_be_reached(make_child_end: Make) -> None:
    left, right = make_child_end("shm", LEFT, connect_s=0.5), make_child_end("shm", RIGHT)
    elsewhere = EngineMetadata.FromString(right.metadata())
    elsewhere.process_scope = "this kernel/another pid namespace"
    left.connect(RIGHT, elsewhere.SerializeToString())
    right.connect(LEFT, left.metadata())
    left.wait_link(up=True)
    with woken(right):
        stop(right)
        left.wait_link(up=False)
        assert not left.writer_gone(RIGHT)
        left.events.clear()
        left.connect(RIGHT, elsewhere.SerializeToString())
        left.wait_link(up=False)
        assert not left.writer_gone(RIGHT)  # its mapping of our memory outlives every link
