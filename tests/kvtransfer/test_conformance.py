"""What every transport promises, tried on all of them: inproc, two ranks as one, UCX and NIXL over shared memory
and TCP."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]

LEFT, RIGHT = 0xFFFF_0000_0000_0001, 2
NUM_PAGES = 64
NOTES = 3000
NOTE_BYTES = 16_000  # all of them are more than sockets take: a receiver's may have 32 MiB
SOON = 10  # heartbeats missed, of 0.1 s, until a peer that was stopped on purpose is given up


@pytest.fixture
def ends(make_end: Make, link: Link) -> tuple[Any, Any]:
    left, right = make_end(LEFT), make_end(RIGHT)
    link(left, right)
    return left, right


def test_pages_land_where_they_were_sent_and_nowhere_else(ends: tuple[Any, Any]) -> None:
    left, right = ends
    left.fill(1)
    right.fill(2)
    pages = random.Random(3).sample(range(NUM_PAGES), NUM_PAGES)
    src, dst, others = pages[:20], pages[20:40], sorted(set(range(NUM_PAGES)) - set(pages[20:40]))
    untouched = right.digest(others)
    op = left.write(RIGHT, src, dst, b"done")
    assert right.wait_note() == NoteReceived(LEFT, b"done")
    assert right.digest(dst) == left.digest(src)
    assert right.digest(others) == untouched
    assert left.wait_done(op) == OpDone(op, None)


def test_a_note_comes_after_all_pages_of_its_write(ends: tuple[Any, Any]) -> None:
    left, right = ends
    for seed in range(10):
        left.fill(seed)
        left.write(RIGHT, list(range(NUM_PAGES)), list(range(NUM_PAGES)), b"written")
        right.wait_note()
        assert right.digest(list(range(NUM_PAGES))) == left.digest(list(range(NUM_PAGES)))
        right.events.clear()


def test_notes_keep_their_order_in_both_directions(ends: tuple[Any, Any]) -> None:
    left, right = ends
    for number in range(100):
        left.note(RIGHT, b"%d" % number)
        right.note(LEFT, b"%d" % number)
    for end in ends:
        end.wait(lambda event: isinstance(event, NoteReceived) and event.data == b"99")
        notes = [event.data for event in end.events if isinstance(event, NoteReceived)]
        assert notes == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize("size", [1, 200, 8_000, 70_000, 1 << 20])
def test_notes_of_any_size_arrive_whole(ends: tuple[Any, Any], size: int) -> None:
    left, right = ends
    data = random.Random(size).randbytes(size)
    left.note(RIGHT, data)
    assert right.wait_note().data == data


def test_every_one_of_many_operations_ends_once(ends: tuple[Any, Any]) -> None:
    left, right = ends
    ops = [left.write(RIGHT, [n % NUM_PAGES], [n * 7 % NUM_PAGES], b"%d" % n) for n in range(2000)]
    left.wait_done(ops[-1])
    right.wait(lambda event: isinstance(event, NoteReceived) and event.data == b"1999")
    assert [event for event in left.events if isinstance(event, OpDone)] == [OpDone(op, None) for op in ops]
    assert sum(isinstance(event, NoteReceived) for event in right.events) == 2000


def test_a_note_waits_for_the_write_before_it(ends: tuple[Any, Any]) -> None:
    left, right = ends
    everything = list(range(NUM_PAGES)) * 10
    left.write(RIGHT, everything, everything, b"first")
    left.note(RIGHT, b"second")
    right.wait(lambda event: event == NoteReceived(LEFT, b"second"))
    assert [event.data for event in right.events if isinstance(event, NoteReceived)] == [b"first", b"second"]


def test_the_descriptor_is_readable_exactly_while_there_are_events(ends: tuple[Any, Any]) -> None:
    left, right = ends
    assert not left.is_readable(0.0)
    op = left.note(RIGHT, b"note")
    right.wait_note()
    left.wait_done(op)
    assert not left.is_readable(0.0)
    right.note(LEFT, b"answer")
    right.wait(lambda event: isinstance(event, OpDone))
    assert left.is_readable(200.0)
    assert left.is_readable(0.0)
    left.wait_note()
    assert not left.is_readable(0.0)


def test_a_page_outside_of_the_pool_is_refused(ends: tuple[Any, Any]) -> None:
    left, _ = ends
    behind = NUM_PAGES + (1 << 20)  # farther than any page for tests of links
    for src, dst in (([behind], [0]), ([0], [behind]), ([-1], [0]), ([0], [-1])):
        with pytest.raises(Exception, match="page"):
            left.write(RIGHT, src, dst)


def test_without_a_link_nothing_can_be_sent(make_end: Make) -> None:
    left = make_end(LEFT)
    with pytest.raises(Exception, match="no link"):
        left.note(RIGHT, b"hello")
    with pytest.raises(Exception, match="no link"):
        left.write(RIGHT, [1], [2])


def test_bad_metadata_is_refused(make_end: Make) -> None:
    left = make_end(LEFT)
    for data in (b"", b"nonsense", b"\xff" * 100):
        with pytest.raises(Exception, match="metadata"):
            left.connect(RIGHT, data)


def test_pools_of_different_models_do_not_link(make_end: Make) -> None:
    left = make_end(LEFT)
    layout = PoolLayout.kv(num_pages=8, num_layers=2, page_size=32, num_kv_heads=2, head_dim=64, dtype="float32")
    other = make_end(RIGHT, layout)
    with pytest.raises(Exception, match="another model"):
        left.connect(RIGHT, other.metadata())


def test_connecting_twice_changes_nothing(ends: tuple[Any, Any]) -> None:
    left, right = ends
    left.connect(RIGHT, right.metadata())
    left.note(RIGHT, b"still here")
    assert right.wait_note().data == b"still here"
    assert sum(isinstance(event, LinkUp) for event in left.events) == 1


def test_disconnecting_ends_the_link_on_both_sides(ends: tuple[Any, Any]) -> None:
    left, right = ends
    left.disconnect(RIGHT)
    left.wait_link(up=False)
    right.wait_link(up=False)
    with pytest.raises(Exception, match="no link"):
        left.note(RIGHT, b"hello")


def test_a_closed_link_can_be_opened_again(ends: tuple[Any, Any], link: Link) -> None:
    left, right = ends
    left.disconnect(RIGHT)
    for end in ends:
        end.wait_link(up=False)
        end.events.clear()
    link(left, right)
    left.note(RIGHT, b"again")
    assert right.wait_note().data == b"again"


def test_a_killed_peer_ends_every_operation_and_then_the_link(ends: tuple[Any, Any]) -> None:
    left, right = ends
    everything = list(range(NUM_PAGES))
    ops = [left.write(RIGHT, everything, everything, b"x") for _ in range(50)]
    right.kill()
    left.wait_link(up=False)
    assert sorted(event.op for event in left.events if isinstance(event, OpDone)) == ops
    assert isinstance(left.events[-1], LinkDown)
    with pytest.raises(Exception, match="no link"):
        left.note(RIGHT, b"hello")
    assert left.writer_gone(RIGHT)


def test_a_new_instance_takes_the_place_of_a_killed_one(ends: tuple[Any, Any], make_end: Make, link: Link) -> None:
    left, right = ends
    right.kill()
    left.wait_link(up=False)
    successor = make_end(77)
    link(left, successor)
    left.fill(5)
    left.write(77, [1, 2], [3, 4], b"for the new one")
    assert successor.wait_note() == NoteReceived(LEFT, b"for the new one")
    assert successor.digest([3, 4]) == left.digest([1, 2])


def test_three_ends_do_not_mix(make_end: Make, link: Link) -> None:
    first, second, third = make_end(1), make_end(2), make_end(3)
    link(first, third)
    link(second, third)
    first.note(3, b"from 1")
    second.note(3, b"from 2")
    third.wait(lambda event: event == NoteReceived(1, b"from 1"))
    third.wait(lambda event: event == NoteReceived(2, b"from 2"))


def test_a_stopped_peer_is_given_up_and_is_still_a_possible_writer(make_process_end: Make, link: Link) -> None:
    left, right = make_process_end(LEFT, heartbeat_misses=SOON), make_process_end(RIGHT)
    link(left, right)
    right.process.send_signal(signal.SIGSTOP)
    try:
        left.wait_link(up=False)
        assert not left.writer_gone(RIGHT)
    finally:
        right.process.send_signal(signal.SIGCONT)
    right.wait_link(up=False)
    link_again(left, right)
    assert left.writer_gone(RIGHT)  # it began a new link, so its part of the former one has ended
    right.kill()
    left.wait_link(up=False)
    assert left.writer_gone(RIGHT)


def test_a_writer_that_was_stopped_stops_writing_soon_after_it_wakes(make_process_end: Make, link: Link) -> None:
    left, right = make_process_end(LEFT, heartbeat_misses=1000), make_process_end(RIGHT, heartbeat_misses=SOON)
    link(left, right)
    everything = list(range(NUM_PAGES)) * 50
    ops = [left.write(RIGHT, everything, everything) for _ in range(20)]
    left.process.send_signal(signal.SIGSTOP)
    try:
        right.wait_link(up=False)
    finally:
        left.process.send_signal(signal.SIGCONT)
    left.wait_link(up=False)
    done = [event for event in left.events if isinstance(event, OpDone)]
    assert [event.op for event in done] == ops
    assert done[-1].error is not None
    assert not right.writer_gone(LEFT)


def test_notes_that_nobody_polls_hold_the_sender_back_and_not_the_link(make_process_end: Make, link: Link) -> None:
    left, right = make_process_end(LEFT), make_process_end(RIGHT, max_waiting_notes=100)
    link(left, right)
    left.ask("notes", peer=RIGHT, count=NOTES, size=NOTE_BYTES)
    while left.is_readable(3.0):  # until nothing happened for twice the time that silence may last
        left.pump(0.0)
    assert sum(isinstance(event, OpDone) for event in left.events) < NOTES
    right.wait(lambda event: isinstance(event, NoteReceived) and event.data.startswith(b"%d" % (NOTES - 1)))
    notes = [event.data for event in right.events if isinstance(event, NoteReceived)]
    assert notes == [str(number).encode().ljust(NOTE_BYTES) for number in range(NOTES)]
    left.pump(0.0)
    assert not any(isinstance(event, LinkDown) for event in left.events + right.events)


def link_again(left: Any, right: Any) -> None:
    for end in (left, right):
        end.events.clear()
    left.connect(right.instance_id, right.metadata())
    right.connect(left.instance_id, left.metadata())
    left.wait_link(up=True)
    right.wait_link(up=True)


def test_a_peer_that_never_connects_back_is_given_up(make_process_end: Make) -> None:
    left, right = make_process_end(LEFT, connect_s=0.5), make_process_end(RIGHT)
    left.connect(RIGHT, right.metadata())
    left.wait_link(up=False)
    assert not any(isinstance(event, LinkUp) for event in left.events)


def test_a_message_for_a_former_instance_is_dropped_and_counted(make_process_end: Make) -> None:
    left, right = make_process_end(LEFT), make_process_end(RIGHT)
    right.connect(LEFT, left.metadata())
    left.connect(999, right.metadata())
    while not right.ask("dropped"):
        for end in (left, right):
            end.pump(0.01)
    assert not any(isinstance(event, LinkUp) for event in (*left.events, *right.events))


def test_the_lanes_are_the_ones_asked_for(make_ucx_end: Make, link: Link, request: pytest.FixtureRequest) -> None:
    left, right = make_ucx_end(LEFT), make_ucx_end(RIGHT)
    link(left, right)
    lanes = left.lanes(RIGHT)
    assert ("tcp" in lanes) == ("tcp" in request.node.callspec.id)


def test_twenty_thousand_one_page_writes_lose_no_event(make_ucx_end: Make, link: Link) -> None:
    left, right = make_ucx_end(LEFT, max_operations=1000), make_ucx_end(RIGHT)
    link(left, right)
    ends = left.ask("write_many", peer=RIGHT, count=20_000)
    assert ends.pop("refused") > 0
    assert ends == {"ops": 20_000, "events": 20_000, "failed": 0}


def test_a_full_queue_is_refused_and_empties(make_process_end: Make, link: Link) -> None:
    left, right = make_process_end(LEFT, max_operations=4), make_process_end(RIGHT)
    link(left, right)
    right.process.send_signal(signal.SIGSTOP)
    everything = list(range(NUM_PAGES)) * 20
    for _ in range(4):
        left.write(RIGHT, everything, everything, b"n" * 100_000)
    with pytest.raises(Exception, match="TransferQueueFull"):
        left.write(RIGHT, everything, everything)
    right.process.send_signal(signal.SIGCONT)
    left.wait(lambda event: isinstance(event, OpDone))


@pytest.mark.parametrize("way", ["copy", "put", "message"])
def test_pages_land_whichever_way_they_travel(make_child_end: Make, link: Link, way: str) -> None:
    left, right = (make_child_end("shm", instance, remote_access=True) for instance in (LEFT, RIGHT))
    link(left, right)
    left.use_path(RIGHT, way)
    left.fill(1)
    src, dst = (random.Random(seed).sample(range(NUM_PAGES), NUM_PAGES) for seed in (2, 3))
    ops = [left.write(RIGHT, src[n:], dst[n:], b"%d" % n) for n in range(NUM_PAGES)]
    left.write(RIGHT, list(range(NUM_PAGES)) * 20, list(range(NUM_PAGES)) * 20, b"last")
    right.wait(lambda event: event == NoteReceived(LEFT, b"last"))
    assert right.digest(list(range(NUM_PAGES))) == left.digest(list(range(NUM_PAGES)))
    left.write(RIGHT, src, dst, b"scattered")
    right.wait(lambda event: event == NoteReceived(LEFT, b"scattered"))
    assert right.digest(dst) == left.digest(src)
    left.wait_done(ops[-1])
    assert {event.error for event in left.events if isinstance(event, OpDone)} == {None}


@pytest.mark.parametrize("way", ["copy", "put", "message"])
def test_a_killed_target_ends_every_operation_whichever_way_it_takes(
    make_child_end: Make, link: Link, way: str
) -> None:
    left, right = (make_child_end("shm", instance, remote_access=True) for instance in (LEFT, RIGHT))
    link(left, right)
    left.use_path(RIGHT, way)
    everything = list(range(NUM_PAGES))
    ops = [left.write(RIGHT, everything, everything, b"x") for _ in range(50)]
    right.kill()
    left.wait_link(up=False)
    assert [event.op for event in left.events if isinstance(event, OpDone)] == ops


def test_a_dead_peers_metadata_leads_to_nothing_soon(make_process_end: Make) -> None:
    left, right = make_process_end(LEFT, connect_s=0.5), make_process_end(RIGHT)
    metadata = right.metadata()
    right.kill()
    left.connect(RIGHT, metadata)
    left.wait_link(up=False)
    assert [type(event) for event in left.events] == [LinkDown]


def test_a_note_that_is_too_long_is_refused(make_process_end: Make, link: Link) -> None:
    left, right = make_process_end(LEFT), make_process_end(RIGHT)
    link(left, right)
    with pytest.raises(Exception, match="NoteTooLong"):
        left.ask("notes", peer=RIGHT, count=1, size=(16 << 20) + 1)
    left.ask("notes", peer=RIGHT, count=1, size=16 << 20)
    assert len(right.wait_note().data) == 16 << 20


def test_a_process_has_one_engine_at_a_time(make_child_end: Make) -> None:
    left = make_child_end("tcp", LEFT)
    with pytest.raises(Exception, match="already"):
        left.ask("open", instance_id=3, layout={}, options={})


def test_an_idle_link_does_not_spin(make_process_end: Make, link: Link) -> None:
    left, right = (make_process_end(instance, heartbeat_s=0.5) for instance in (LEFT, RIGHT))
    link(left, right)
    began, cpu_s = time.monotonic(), left.ask("cpu_s")
    assert not left.is_readable(1.5)
    assert left.ask("cpu_s") - cpu_s < 0.25 * (time.monotonic() - began)  # who spins takes a whole core


@pytest.mark.parametrize("end_right", ["kill", "leave"])
def test_processes_leave_no_shared_memory_however_they_end(make_ucx_end: Make, link: Link, end_right: str) -> None:
    left, right = make_ucx_end(LEFT), make_ucx_end(RIGHT)
    link(left, right)
    creators = {left.process.pid, right.process.pid}
    assert bool(segments(creators)) == ("sysv" in left.lanes(RIGHT))
    right.kill() if end_right == "kill" else right.leave()
    left.wait_link(up=False)
    left.close()
    assert segments(creators) == []
    assert [path for path in Path("/dev/shm").iterdir() if "ucx" in path.name] == []


def segments(creators: set[int]) -> list[str]:
    """The shared memory segments of the system that those processes made."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return [line for line in lines if int(line.split()[4]) in creators]
