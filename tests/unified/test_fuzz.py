"""A linked peer that says anything: its rooms may fail, the worker and its books do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fuzzing import U32, U64, fuzz
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.members.roles import LegKind, Role
from diptych.engine.values.events import (
    DigestPages,
    NoteArrived,
    PagesDigested,
    PeerDown,
    SendNote,
    StreamPages,
    WriteDone,
    WritePages,
    WriterGone,
)
from diptych.generation.page_hash import prompt_hash
from diptych.kvtransfer import note_codec
from diptych.kvtransfer.errors import MalformedNote
from diptych.kvtransfer.notes import Abort, AbortAck, Ack, HandOff, Note, PagesReady

OWN, PEER = 1, 2
PROMPT = list(range(1, 12))
ROOMS = st.integers(1, 5)
SMALL = st.lists(st.integers(0, 70) | U32, max_size=6)


def notes() -> st.SearchStrategy[Note]:
    numbers = st.tuples(SMALL, st.integers(0, 12) | U32, st.just(len(PROMPT)) | U32, st.sampled_from((4, 2, 0)) | U32)
    hashes = st.just(prompt_hash(np.array(PROMPT), b"")) | U64
    grant = st.builds(
        lambda room, some, hash: PagesReady(room, tuple(some[0]), tuple(some[0]), some[1], some[2], some[3], hash),
        ROOMS,
        numbers,
        hashes,
    )
    pages = st.builds(tuple, SMALL)
    hand_off = st.builds(HandOff, ROOMS, U32, st.sampled_from((None, "stop", "length")), U32, pages, U32)
    abort = st.builds(Abort, ROOMS, st.integers(1, 9), st.text(max_size=3))
    return grant | hand_off | abort | st.builds(Ack, ROOMS) | st.builds(AbortAck, ROOMS)


def as_received(note: Note) -> Note:
    return note_codec.decode(note_codec.encode(note, sender=PEER, target=OWN), sender=PEER, target=OWN)


class Victim:
    """The worker, and the rooms in which it has granted pages."""

    def __init__(self, fleet: Any) -> None:
        self.worker = fleet.workers[OWN]
        self.core = self.worker.core
        self.granted: dict[int, PagesReady] = {}
        for room, kind in ((1, LegKind.PREFILL), (2, LegKind.PREFILL), (3, LegKind.DECODE), (4, LegKind.DECODE)):
            fleet.start_leg(OWN, room, PROMPT, kind, PEER)

    def receive(self, note: Note, digest: int | None) -> None:
        self.core.handle(NoteArrived(PEER, note, digest), 0.0)
        self.step()

    def step(self) -> None:
        self.core.expire(0.0)
        self.perform()
        self.worker.stepping.advance(self.perform)
        self.perform()
        assert self.worker.cache.audit(self.core.report().holders) == []

    def perform(self) -> None:
        for effect in self.core.pop_effects():
            match effect:
                case SendNote(_, PagesReady() as grant):
                    self.granted[grant.room] = grant
                case WritePages(room) | StreamPages(room):
                    self.core.handle(WriteDone(room, None, 0), 0.0)
                case DigestPages(room):
                    self.core.handle(PagesDigested(room, 0), 0.0)


@pytest.mark.parametrize("is_lost", [False, True])
@fuzz
@given(said=st.lists(st.tuples(notes(), st.booleans(), st.sampled_from((None, 0, 1))), max_size=12))
def test_any_notes_in_any_order(fleet_class: Any, is_lost: bool, said: list[tuple[Note, bool, int | None]]) -> None:
    victim = Victim(fleet_class(Role.UNIFIED, Role.UNIFIED))
    victim.step()
    for note, is_honest, digest in said:
        if is_honest and isinstance(note, HandOff) and note.room in victim.granted:  # but for its token
            grant = victim.granted[note.room]
            num_pages = len(grant.pages)
            note = HandOff(note.room, note.first_token, note.finish, num_pages, grant.generations, note.cached_tokens)
        try:
            victim.receive(as_received(note), digest)
        except MalformedNote:
            continue
    if is_lost:
        victim.core.handle(PeerDown(PEER, "gone"), 0.0)
        victim.core.handle(WriterGone(PEER), 0.0)
        for _ in range(8):
            victim.step()
        assert victim.core.report().num_open_rooms == 0
        counts = victim.worker.cache.pool.counts()
        assert (counts["importing"], counts["quarantined"], counts["exporting"], counts["owned"]) == (0, 0, 0, 0)
