"""Two ranks that do not keep step: what holds of both must hold of the slower one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diptych.engine.tensor_parallel.transfers.rank_id import rank_id
from diptych.kvtransfer.errors import MalformedMetadata
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone
from diptych.v1 import rank_pb2

Make = Callable[..., Any]
Link = Callable[[Any, Any], None]

LEFT, RIGHT = 1, 2


@pytest.fixture
def ends(make_ranked_end: Make, link: Link) -> tuple[Any, Any]:
    left, right = make_ranked_end(LEFT), make_ranked_end(RIGHT)
    link(left, right)
    for end in (left, right):
        end.events.clear()
    return left, right


def poll_rank_0(*ends: Any) -> None:
    """Let everything happen but what rank 1 does."""
    for _ in range(3):
        ends[0].networks[0].deliver_all()
        for end in ends:
            end.events += end.transport.poll()


def test_a_link_is_up_when_both_ranks_are_linked(make_ranked_end: Make) -> None:
    left, right = make_ranked_end(LEFT), make_ranked_end(RIGHT)
    left.connect(RIGHT, right.metadata())
    right.connect(LEFT, left.metadata())
    poll_rank_0(left, right)
    assert (left.events, right.events) == ([], [])
    with pytest.raises(Exception, match="no link"):
        left.note(RIGHT, b"too early")
    left.wait_link(up=True)
    right.wait_link(up=True)


def test_a_note_waits_for_the_slower_rank(ends: tuple[Any, Any]) -> None:
    left, right = ends
    left.fill(1)
    op = left.write(RIGHT, [1, 2], [3, 4], b"all is there")
    later = left.note(RIGHT, b"and more")
    poll_rank_0(left, right)
    assert (left.events, right.events) == ([], [])
    right.wait(lambda event: event == NoteReceived(LEFT, b"and more"))
    assert right.events == [NoteReceived(LEFT, b"all is there"), NoteReceived(LEFT, b"and more")]
    assert left.wait_done(op) == OpDone(op, None)
    assert left.wait_done(later) == OpDone(later, None)
    assert right.digest([3, 4]) == left.digest([1, 2])


def test_the_digest_covers_every_rank(ends: tuple[Any, Any]) -> None:
    left, _ = ends
    before = left.wait_digest([7])
    left.part.buffer[7 * left.part.layout.page_nbytes] ^= 1
    assert left.wait_digest([7]) != before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_that_breaks_on_one_rank_ends_on_both_after_its_operations(ends: tuple[Any, Any], rank: int) -> None:
    left, right = ends
    op = left.write(RIGHT, [1, 2], [3, 4], b"never to come")
    left.networks[rank].cut(rank_id(LEFT, rank), rank_id(RIGHT, rank))
    left.wait_link(up=False)
    right.wait_link(up=False)
    assert [type(event) for event in left.events] == [OpDone, LinkDown]
    assert left.wait_done(op).error
    assert [type(event) for event in right.events] == [LinkDown]
    left.events.clear()
    left.connect(RIGHT, right.metadata())
    right.connect(LEFT, left.metadata())
    left.wait(lambda event: event == LinkUp(RIGHT))


def test_what_a_rank_still_has_in_its_log_is_answered_before_the_link_is_down(ends: tuple[Any, Any]) -> None:
    """Rank 1 hears of the write when its link is gone."""
    left, _ = ends
    left.networks[1].cut(rank_id(LEFT, 1), rank_id(RIGHT, 1))
    left.rank.report(left.transfer)
    op = left.write(RIGHT, [1], [2], b"never to come")
    poll_rank_0(left)
    assert left.events == []
    left.wait_link(up=False)
    assert [type(event) for event in left.events] == [OpDone, LinkDown]
    assert left.wait_done(op).error


def test_a_writer_is_gone_when_it_is_gone_on_both_ranks(ends: tuple[Any, Any]) -> None:
    left, right = ends
    right.networks[0].kill(RIGHT)
    poll_rank_0(left)
    assert not left.writer_gone(RIGHT)  # its rank 1 lives, and has not heard that the link is closed
    right.networks[1].deliver_all()
    assert left.writer_gone(RIGHT)


def test_metadata_of_no_rank_or_of_another_version_is_refused(ends: tuple[Any, Any]) -> None:
    left, right = ends
    ranks = rank_pb2.RankedEngineMetadata.FromString(right.metadata()).ranks
    for wrong in (rank_pb2.RankedEngineMetadata(version=2), rank_pb2.RankedEngineMetadata(version=1, ranks=ranks)):
        with pytest.raises(MalformedMetadata, match=r"version [12] with [02] ranks; ours is of version 2"):
            left.connect(99, wrong.SerializeToString())
