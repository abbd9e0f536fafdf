from __future__ import annotations

from collections import deque

import numpy as np

from diptych.kvtransfer.nixl.streams import PIECE_NBYTES, Operation, PageCopy, Piece, Streams
from diptych.kvtransfer.runs import ByteWindow

PAGE_NBYTES = PIECE_NBYTES // 4


def operation(
    name: int, stream: int, num_pages: int, *, priority: int = 0, note: bytes = b"", digest: int | None = None
) -> Operation:
    pages = np.arange(num_pages, dtype=np.int32)
    parts = deque([note] if note else [])
    window = ByteWindow(0, 0, PAGE_NBYTES)
    copies = deque([PageCopy(pages, pages, window)] if num_pages else [])
    return Operation(name, stream, priority, 100.0, copies, parts, digest=digest)


def posted(streams: Streams) -> list[tuple[int, int]]:
    """Operations and their pages, as they are posted; all of it ends at once."""
    order = []
    while (piece := streams.next_piece()) is not None:
        order.append((piece.operation.name, len(piece.src)))
        piece.operation.num_in_flight -= 1
    return order


def test_an_operation_waits_until_the_one_before_it_is_written() -> None:
    streams = Streams()
    streams.add(operation(1, 7, 4))
    streams.add(operation(2, 7, 4))
    piece = streams.next_piece()
    assert piece is not None
    assert streams.next_piece() is None
    piece.operation.num_in_flight -= 1
    assert ended(streams) == [(1, None)]
    assert posted(streams) == [(2, 4)]


def ended(streams: Streams) -> list[tuple[int, str | None]]:
    ends = []
    for each in streams.written():
        streams.end(each)
        ends.append((each.name, each.error))
    return ends


def test_operations_are_cut_into_pieces_and_end_in_order() -> None:
    streams = Streams()
    streams.add(operation(1, 7, 9))
    streams.add(operation(2, 7, 0))
    assert ended(streams) == []
    assert posted(streams) == [(1, 4), (1, 4), (1, 1)]
    assert ended(streams) == [(1, None), (2, None)]
    assert not streams


def test_a_short_stream_does_not_wait_for_a_long_one() -> None:
    streams = Streams()
    streams.add(operation(1, 7, 40))
    assert streams.next_piece() is not None
    streams.add(operation(2, 8, 2))
    assert posted(streams)[:2] in ([(2, 2), (1, 4)], [(1, 4), (2, 2)])


def test_streams_take_turns_by_bytes() -> None:
    streams = Streams()
    streams.add(operation(1, 7, 16))
    for name in range(2, 10):
        streams.add(operation(name, 8, 2))
    nbytes = {7: 0, 8: 0}
    for _ in range(6):
        piece = streams.next_piece()
        assert isinstance(piece, Piece)
        nbytes[piece.operation.stream] += piece.nbytes
        piece.operation.num_in_flight -= 1
        ended(streams)
        assert abs(nbytes[7] - nbytes[8]) <= PIECE_NBYTES


def test_a_stream_has_no_claim_on_turns_that_it_did_not_take() -> None:
    streams = Streams()
    streams.add(operation(1, 8, 1, digest=0))  # its digest keeps the stream
    posted(streams)
    ended(streams)
    streams.add(operation(2, 7, 40))
    for _ in range(5):
        streams.next_piece()
    streams.add(operation(3, 8, 40))
    turns = [piece.operation.stream for _ in range(4) if (piece := streams.next_piece()) is not None]
    assert sorted(turns) == [7, 8, 8, 8]  # the first turn is a gift


def test_higher_priorities_go_first() -> None:
    streams = Streams()
    streams.add(operation(1, 7, 4))
    streams.add(operation(2, 8, 8, priority=1))
    assert posted(streams) == [(2, 4), (2, 4), (1, 4)]


def test_what_is_late_posts_nothing_more_and_ends_when_what_was_posted_has() -> None:
    streams = Streams()
    streams.add(operation(1, 7, 8))
    piece = streams.next_piece()
    assert piece is not None
    streams.expire(101.0)
    assert streams.next_piece() is None
    assert ended(streams) == []
    piece.operation.num_in_flight -= 1
    assert ended(streams) == [(1, "timed out")]


def test_a_failure_fails_what_comes_after_it_on_its_stream_only() -> None:
    streams = Streams()
    for name, stream in ((1, 7), (2, 7), (3, 8)):
        streams.add(operation(name, stream, 1))
    streams.all()[0].fail("broken")
    later = "an earlier operation of its stream failed"
    assert ended(streams) == [(1, "broken"), (2, later)]
    posted(streams)
    assert ended(streams) == [(3, None)]
    streams.add(operation(4, 7, 1))
    assert posted(streams) == []
    assert ended(streams) == [(4, later)]


def test_a_failure_on_stream_zero_breaks_nothing() -> None:
    streams = Streams()
    for name in (1, 2):
        streams.add(operation(name, 0, 1))
    streams.all()[0].fail("broken")
    assert ended(streams) == [(1, "broken")]
    posted(streams)
    assert ended(streams) == [(2, None)]


def test_a_note_carries_the_digest_of_all_since_the_last_note() -> None:
    streams = Streams()
    for name, note, digest in ((1, b"", 5), (2, b"", None), (3, b"note", 2**64 - 1), (4, b"note", None)):
        streams.add(operation(name, 7, 1, note=note, digest=digest))
    digests = []
    while streams:
        posted(streams)
        for each in streams.written():
            digests.append(streams.digest_of(each))
            streams.end(each)
    assert digests[2:] == [4, None]
