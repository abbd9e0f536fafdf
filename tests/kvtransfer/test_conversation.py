from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diptych.kvtransfer.conversation import (
    PART_NBYTES,
    Conversation,
    Down,
    Frame,
    Kind,
    Note,
    Up,
    decode_frame,
    encode_frame,
    is_authentic,
    parts_of,
)
from diptych.kvtransfer.errors import MalformedNote

KEY = b"sixteen bytes ok"
LEFT, RIGHT = 0xFFFF_0000_0000_0001, 2


def conversation(own: int, peer: int, session: int = 1, *, former_session: int = 0, window: int = 8) -> Conversation:
    return Conversation(own, peer, session, former_session=former_session, window=window, now_ns=0)


def linked(window: int = 8) -> tuple[Conversation, Conversation]:
    left, right = conversation(LEFT, RIGHT, 5, window=window), conversation(RIGHT, LEFT, 9, window=window)
    for now_ns in (1, 2):
        greetings = left.beat(now_ns), right.beat(now_ns)
        right.receive(greetings[0], now_ns)
        left.receive(greetings[1], now_ns)
    assert left.is_up
    assert right.is_up
    return left, right


def said(speaker: Conversation, note: bytes, digest: int | None = None) -> list[Frame]:
    parts = parts_of(note)
    return [
        speaker.next_frame(part, is_last=number == len(parts) - 1, digest=digest if number == len(parts) - 1 else None)
        for number, part in enumerate(parts)
    ]


def test_a_frame_survives_its_journey() -> None:
    frame = Frame(Kind.NOTE, LEFT, RIGHT, 3, 4, 5, 6, 7, 8, 9, digest=2**64 - 1, data=b"note")
    assert decode_frame(encode_frame(frame, KEY)) == frame
    empty = replace(frame, digest=None, data=b"")
    assert decode_frame(encode_frame(empty, KEY)) == empty


def test_a_frame_is_authentic_for_the_owner_of_its_key_alone() -> None:
    data = encode_frame(Frame(Kind.BEAT, LEFT, RIGHT, 3, 4), KEY)
    assert is_authentic(data, KEY)
    assert not is_authentic(data, KEY[::-1])
    assert not is_authentic(data[:8], KEY)
    assert not is_authentic(b"", KEY)


@pytest.mark.parametrize("data", [b"", b"\x02", b"\x01" * 88, b"\x02\x09" + b"\x00" * 86])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedNote):
        decode_frame(KEY + data)


def test_a_link_is_up_when_the_peer_names_our_session() -> None:
    left, right = conversation(LEFT, RIGHT, 5), conversation(RIGHT, LEFT, 9)
    assert right.receive(left.beat(1), 1) == []
    assert not right.is_up
    assert left.receive(right.beat(1), 1) == [Up()]
    assert right.receive(left.beat(2), 2) == [Up()]
    assert left.receive(right.beat(2), 2) == []


def test_frames_of_former_links_belong_to_none() -> None:
    left, right = linked()
    old = right.beat(3)
    again = conversation(LEFT, RIGHT, 6, former_session=9)
    assert again.receive(old, 3) is None
    assert left.receive(replace(old, session=8), 3) is None
    assert left.receive(replace(old, peer_session=4), 3) is None


def test_a_peer_that_begins_anew_has_closed_its_end() -> None:
    left, _ = linked()
    assert left.receive(conversation(RIGHT, LEFT, 10).beat(3), 3) == [Down("the peer began a new link")]


def test_a_goodbye_closes() -> None:
    left, right = linked()
    assert left.receive(right.bye(), 3) == [Down("the peer closed the link")]


def test_notes_come_in_order_however_their_frames_do() -> None:
    left, right = linked(window=64)
    notes = [bytes([number]) * size for number, size in enumerate((1, PART_NBYTES, 2 * PART_NBYTES + 7, 3))]
    frames = [frame for number, note in enumerate(notes) for frame in said(left, note, number)]
    random.Random(1).shuffle(frames)
    heard = [each for frame in frames for each in right.receive(frame, 3) or []]
    assert heard == [Note(note, number) for number, note in enumerate(notes)]


def test_a_peer_waits_until_its_notes_were_polled() -> None:
    left, right = linked(window=2)
    for _ in range(2):
        assert left.has_room
        right.receive(said(left, b"note")[0], 3)
    left.receive(right.beat(4), 4)
    assert not left.has_room
    right.num_polled += 1
    assert right.peer_should_know
    left.receive(right.beat(5), 5)
    assert not right.peer_should_know
    assert left.has_room


def test_a_note_longer_than_the_window_gets_through() -> None:
    left, right = linked(window=2)
    heard = []
    for part in parts_of(b"x" * (5 * PART_NBYTES)):
        assert left.has_room
        heard += right.receive(left.next_frame(part, is_last=False, digest=None), 3) or []
        left.receive(right.beat(4), 4)
    assert heard == []


def test_the_round_trip_is_without_the_time_that_the_peer_thought() -> None:
    left, right = linked()
    right.receive(left.beat(1_000), 3_000)
    left.receive(right.beat(1_000_000), 1_003_000)
    assert left.rtt_s == pytest.approx(5e-6)
