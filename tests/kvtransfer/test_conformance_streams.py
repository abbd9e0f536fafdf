"""What every transport promises of streams: order within, turns between, priorities, deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diptych.kvtransfer.transport import LinkDown, NoteReceived, OpDone

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]

LEFT, RIGHT = 1, 2
EVERYTHING = list(range(64))
BIG = EVERYTHING * 100  # 400 MiB


@pytest.fixture
def ends(make_end: Make, link: Link, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    if "cuda" in request.node.callspec.id:
        pytest.skip("400 MiB have moved before the next operation is submitted: the emulation takes turns for it")
    left, right = make_end(LEFT), make_end(RIGHT)
    link(left, right)
    return left, right


def ended(end: Any) -> list[int]:
    return [event.op for event in end.events if isinstance(event, OpDone)]


def errors(end: Any) -> dict[int, str | None]:
    return {event.op: event.error for event in end.events if isinstance(event, OpDone)}


def test_a_short_transfer_ends_while_a_long_one_of_another_stream_still_moves(ends: tuple[Any, Any]) -> None:
    left, right = ends
    long = left.write(RIGHT, BIG * 2, BIG * 2, b"long", stream=1)
    short = left.write(RIGHT, [1, 2], [3, 4], b"short", stream=2)
    left.wait_done(long)
    assert ended(left) == [short, long]
    right.wait(lambda event: isinstance(event, NoteReceived) and event.data == b"long")
    assert [event.data for event in right.events if isinstance(event, NoteReceived)] == [b"short", b"long"]


def test_long_transfers_share_the_link(ends: tuple[Any, Any]) -> None:
    """Each moves at half of the speed, so the shorter one ends first though it began last."""
    left, _ = ends
    first = left.write(RIGHT, BIG * 2, BIG * 2, stream=1)
    second = left.write(RIGHT, BIG[:1600], BIG[:1600], stream=2)
    left.wait_done(first)
    assert ended(left) == [second, first]


def test_a_stream_keeps_its_order_whatever_others_do(ends: tuple[Any, Any]) -> None:
    left, right = ends
    left.write(RIGHT, EVERYTHING * 10, EVERYTHING * 10, b"1", stream=7)
    left.write(RIGHT, [1], [2], b"other", stream=8)
    left.note(RIGHT, b"2", stream=7)
    left.write(RIGHT, [1], [2], stream=7)
    left.note(RIGHT, b"3", stream=7)
    right.wait(lambda event: isinstance(event, NoteReceived) and event.data == b"3")
    notes = [event.data for event in right.events if isinstance(event, NoteReceived) and event.data != b"other"]
    assert notes == [b"1", b"2", b"3"]


def test_a_higher_priority_goes_first(ends: tuple[Any, Any]) -> None:
    left, _ = ends
    low = left.write(RIGHT, BIG * 2, BIG * 2, stream=1)
    high = left.write(RIGHT, BIG[:1600], BIG[:1600], stream=2, priority=1)
    same = left.write(RIGHT, BIG[:1600], BIG[:1600], stream=3)
    left.wait_done(low)
    assert ended(left) == [high, same, low]


def test_an_operation_that_takes_too_long_fails_and_its_stream_with_it(ends: tuple[Any, Any]) -> None:
    left, right = ends
    late = left.write(RIGHT, BIG, BIG, b"never", stream=1, timeout_s=0.001)
    behind = left.write(RIGHT, [1], [2], b"never either", stream=1)
    other = left.write(RIGHT, [1], [2], b"other", stream=2, timeout_s=60.0)
    for end in ends:
        end.let_time_pass(1.0)
    left.wait_done(behind)
    after = left.note(RIGHT, b"nor this", stream=1)
    said = left.note(RIGHT, b"it failed")
    for op in (other, after, said):
        left.wait_done(op)
    broken = "an earlier operation of its stream failed"
    assert errors(left) == {late: "timed out", behind: broken, other: None, after: broken, said: None}
    for note in (b"other", b"it failed"):
        right.wait(lambda event, note=note: event == NoteReceived(LEFT, note))
    assert {event.data for event in right.events if isinstance(event, NoteReceived)} == {b"other", b"it failed"}


def test_after_a_failed_operation_nothing_more_of_it_is_written(ends: tuple[Any, Any]) -> None:
    left, right = ends
    late = left.write(RIGHT, BIG, BIG, stream=1, timeout_s=0.001)
    for end in ends:
        end.let_time_pass(1.0)
    assert left.wait_done(late).error == "timed out"
    right.fill(3)
    untouched = right.digest(EVERYTHING)
    left.wait_done(left.note(RIGHT, b"it failed"))
    right.wait_note()
    assert right.digest(EVERYTHING) == untouched
    assert left.describe(RIGHT)["queued_bytes"] == left.describe(RIGHT)["in_flight_bytes"] == 0


def test_an_operation_in_time_is_not_disturbed_by_its_deadline(ends: tuple[Any, Any]) -> None:
    left, right = ends
    op = left.write(RIGHT, [1], [2], b"in time", stream=1, timeout_s=60.0)
    assert left.wait_done(op) == OpDone(op, None)
    assert right.wait_note().data == b"in time"


def test_a_killed_peer_ends_the_operations_of_every_stream(ends: tuple[Any, Any]) -> None:
    left, right = ends
    ops = [left.write(RIGHT, EVERYTHING, EVERYTHING, b"x", stream=n % 5) for n in range(50)]
    right.kill()
    left.wait_link(up=False)
    assert sorted(ended(left)) == ops
    assert isinstance(left.events[-1], LinkDown)


def test_a_link_says_what_is_queued_and_how_far_the_peer_is(make_process_end: Make, link: Link) -> None:
    left, right = make_process_end(LEFT), make_process_end(RIGHT)
    link(left, right)
    op = left.write(RIGHT, BIG * 4, BIG * 4)
    assert left.describe(RIGHT)["queued_bytes"] > 0
    left.wait_done(op)
    while left.describe(RIGHT)["rtt_s"] is None:
        left.pump(0.1)
    info = left.describe(RIGHT)
    assert (info["queued_bytes"], info["in_flight_bytes"], info["bytes_sent"]) == (0, 0, 4 * len(BIG) << 16)
    assert 0 < info["rtt_s"] < 60, "s: it was not waited for any longer"


def test_only_so_many_broken_streams_are_remembered(make_ucx_end: Make, link: Link) -> None:
    """Their callers have heard of the failure long ago."""
    left, right = make_ucx_end(LEFT), make_ucx_end(RIGHT)
    link(left, right)
    for stream in range(1, 81):
        op = left.write(RIGHT, [0], [0], stream=stream, timeout_s=1e-9)
        assert left.wait_done(op).error == "timed out"
    assert left.wait_done(left.write(RIGHT, [0], [0], stream=80)).error == "an earlier operation of its stream failed"
    assert left.wait_done(left.write(RIGHT, [0], [0], stream=1)).error is None
