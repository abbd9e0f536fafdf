from __future__ import annotations

import pytest

from diptych.kvtransfer import note_codec
from diptych.kvtransfer.errors import MalformedNote
from diptych.kvtransfer.notes import Ack
from diptych.kvtransfer.probe import notes
from diptych.kvtransfer.probe.notes import ProbeAsk, ProbeCheck, ProbeEnd, ProbeFound, ProbeNote, ProbeOffer

NOTES = [
    ProbeAsk(),
    ProbeOffer((5, 6), 16),
    ProbeCheck(),
    ProbeFound(2**64 - 1),
    ProbeEnd("copy", 4.5e9),
    ProbeEnd("", reason="no path works"),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: type(note).__name__)
def test_a_note_survives_the_wire(note: ProbeNote) -> None:
    assert notes.decode(notes.encode(note, sender=1, target=2), sender=1, target=2) == note


@pytest.mark.parametrize("note", NOTES, ids=lambda note: type(note).__name__)
def test_a_note_about_the_link_is_none_about_a_room(note: ProbeNote) -> None:
    with pytest.raises(MalformedNote, match="room 0"):
        note_codec.decode(notes.encode(note, sender=1, target=2), sender=1, target=2)


def test_a_note_about_a_room_is_none_about_the_link() -> None:
    with pytest.raises(MalformedNote, match="room 7"):
        notes.decode(note_codec.encode(Ack(7), sender=1, target=2), sender=1, target=2)


def test_a_note_for_a_former_instance_is_refused() -> None:
    with pytest.raises(MalformedNote, match="not this link"):
        notes.decode(notes.encode(ProbeAsk(), sender=1, target=2), sender=1, target=3)
