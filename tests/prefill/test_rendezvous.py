from __future__ import annotations

from dataclasses import replace

from diptych.kvtransfer.notes import Abort, PagesReady
from diptych.prefill.rendezvous import KEEP_S, MAX_PARKED_PAGES, Rendezvous

GRANT = PagesReady(
    room=1, pages=(4,), generations=(1,), cached_prefix_len=0, num_prompt_tokens=3, page_size=4, prompt_hash=9
)
ABORT = Abort(room=1, code=6, message="gone")


def test_a_note_is_taken_once() -> None:
    rendezvous = Rendezvous()
    rendezvous.park(7, GRANT, 0.0)
    assert rendezvous.pop(7, 1) == GRANT
    assert rendezvous.pop(7, 1) is None


def test_another_peers_room_of_the_same_number_is_another_room() -> None:
    rendezvous = Rendezvous()
    rendezvous.park(7, GRANT, 0.0)
    assert rendezvous.pop(8, 1) is None


def test_an_abort_replaces_a_grant_and_outlasts_a_late_one() -> None:
    rendezvous = Rendezvous()
    rendezvous.park(7, GRANT, 0.0)
    rendezvous.park(7, ABORT, 1.0)
    rendezvous.park(7, GRANT, 2.0)
    assert rendezvous.pop(7, 1) == ABORT


def test_only_grants_are_reported_when_they_expire() -> None:
    rendezvous = Rendezvous()
    rendezvous.park(7, GRANT, 0.0)
    rendezvous.park(8, ABORT, 1.0)
    assert rendezvous.next_expiry_s() == KEEP_S
    assert rendezvous.expire(KEEP_S - 0.1) == []
    assert rendezvous.expire(KEEP_S) == [(7, 1)]
    assert rendezvous.expire(KEEP_S + 1.0) == []
    assert rendezvous.next_expiry_s() is None


def test_a_lost_peers_notes_are_forgotten() -> None:
    rendezvous = Rendezvous()
    rendezvous.park(7, GRANT, 0.0)
    rendezvous.park(8, GRANT, 0.0)
    rendezvous.forget(7)
    assert rendezvous.pop(7, 1) is None
    assert rendezvous.pop(8, 1) == GRANT


def test_a_peer_can_not_make_it_keep_more_than_so_many_pages() -> None:
    """The oldest notes expire early, and their senders are told as always."""
    rendezvous, big = Rendezvous(), tuple(range(MAX_PARKED_PAGES // 4))
    for room in range(1, 6):
        rendezvous.park(7, replace(GRANT, room=room, pages=big), 0.0)
    assert rendezvous.expire(0.0) == [(7, 1), (7, 2)]
    assert [rendezvous.pop(7, room) is not None for room in range(1, 6)] == [False, False, True, True, True]
    assert rendezvous.expire(KEEP_S) == []
